//! The trial runs that decide the strength of the decay of pruned weights, in the run's folder.

use std::{io::ErrorKind, sync::Arc};

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use twofour_nn::{
    recipe::{Recipe, RecipeData},
    train::{DecayChoice, DecaySearch, DecayTrial, SparsityPlan},
};
use twofour_transformer::engine::Engine;

use super::folder::Folder;
use crate::{
    exit::Usage,
    interrupt,
    present::{
        Screen,
        table::{Align, Table},
    },
};

/// The trials that are done, and what they found.
pub(super) const FILE: &str = "decay.json";

/// The contents of [`FILE`].
#[derive(Debug, Serialize, Deserialize)]
struct DecayFile {
    search: DecaySearch,
    /// Of the text.
    corpus: u64,
    trials: Vec<DecayTrial>,
    choice: Option<DecayChoice>,
}

/// Runs the trials that the folder has not had yet, and returns the choice; nothing where the recipe asks for none. The
/// engine is lent to one trial after another.
///
/// # Errors
/// Those of a trial; [`interrupt::Interrupted`], after which the same command goes on.
pub(super) fn search<E: Engine, D: RecipeData>(
    mut engine: E,
    recipe: &Recipe,
    plan: &SparsityPlan,
    data: &Arc<D>,
    folder: &Folder,
    screen: &mut Screen,
) -> Result<(E, Option<DecayChoice>)> {
    let Some(search) = recipe.decay_search() else { return Ok((engine, None)) };
    let mut file = read(folder, search, data.fingerprint())?;
    if file.choice.is_none() {
        screen.line(format!(
            "Searching the decay of pruned weights: {} trials of {} steps",
            file.search.trials().count(),
            file.search.steps
        ))?;
        for strength in file.search.trials() {
            if file.trials.iter().any(|trial| trial.strength == strength) {
                continue;
            }
            if interrupt::requested() {
                return Err(interrupt::Interrupted.into());
            }
            let model = D::config::<E>(recipe);
            let (back, trial) = file.search.run(engine, (&model, &recipe.training), plan, data, strength)?;
            engine = back;
            file.trials.push(trial);
            folder.write_json(FILE, &file)?;
        }
        file.choice = file.search.choose(&file.trials);
        folder.write_json(FILE, &file)?;
    }
    if let Some(choice) = &file.choice {
        show(choice, screen)?;
    }
    Ok((engine, file.choice))
}

/// An error where the folder has trials of another search or of other text.
pub(super) fn expect_own(folder: &Folder, search: DecaySearch, corpus: u64) -> Result<()> {
    read(folder, search, corpus).map(drop)
}

/// The folder's trials, where they are those of this search on this text.
fn read(folder: &Folder, search: DecaySearch, corpus: u64) -> Result<DecayFile> {
    let path = folder.file(FILE);
    let at = || path.display().to_string();
    let text = match std::fs::read(&path) {
        Ok(text) => text,
        Err(error) if error.kind() == ErrorKind::NotFound => {
            return Ok(DecayFile { search, corpus, trials: vec![], choice: None });
        }
        Err(error) => return Err(error).with_context(at),
    };
    let fault = |why: &str| Usage(format!("{}: {why}; choose another folder with -o", path.display()));
    let file: DecayFile = serde_json::from_slice(&text).map_err(|error| fault(&error.to_string()))?;
    if file.search != search || file.corpus != corpus {
        return Err(fault("trial runs of another search or of other text").into());
    }
    Ok(file)
}

fn show(choice: &DecayChoice, screen: &mut Screen) -> Result<()> {
    let mut table =
        Table::new([("decay", Align::Right), ("flip rate", Align::Right), ("ratio to dense", Align::Right)]);
    let ratio = |ratio: Option<f64>| ratio.map_or("-".to_owned(), |ratio| format!("{ratio:.3}"));
    table.row(["dense".to_owned(), format!("{:.5}", choice.dense_flip_rate), "1.000".to_owned()]);
    for candidate in &choice.candidates {
        let strength = format!("{:e}", candidate.strength);
        table.row([strength, format!("{:.5}", candidate.flip_rate), ratio(candidate.ratio)]);
    }
    screen.line(table)?;
    let [low, high] = DecaySearch::RATIOS;
    let place = if choice.is_feasible { "within" } else { "none is within, the nearest to" };
    screen.line(format!("decay {:e}: ratio {}, {place} {low} to {high}", choice.strength, ratio(choice.ratio)))
}
