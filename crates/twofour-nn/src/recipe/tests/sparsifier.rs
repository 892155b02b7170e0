//! Recipes of sparsifiers.

use std::path::Path;

use super::{GOOD, lines, parse};
use crate::{
    recipe::{DeviceKind, Method, Recipe, SparsifierCriterion, SparsifierKind, SparsifierSettings},
    train::{BlockNorm, LevelSchedule, PatternText, SparseBegin, SparsifierRule},
};

/// A sparsifier, and an override with another one.
const RICH: &str = "\
[model]
layers = 2
width = 64
heads = 4
context = 32
[data]
text = 'a.txt'
[training]
steps = 1000
batch = 8
[sparsity]
method = 'sparsifier'
begin = 0.2
[sparsity.sparsifier]
kind = 'weight-norm'
block = [4, 8]
zeros_per_block = 24
norm = 'l1'
level = 0.75
schedule = 'cubic'
start_level = 0.1
until = 0.6
[[sparsity.override]]
layers = ['blocks.1.mlp.*']
begin = 0.5
weight_gradient = 'masked'
[sparsity.override.sparsifier]
kind = 'nearly-diagonal'
nearliness = 5
schedule = 'one-shot'
in_place = true
";

#[test]
fn a_sparsifier_is_planned_for_the_section_and_for_overrides() {
    let recipe = parse(RICH, &[]).unwrap();
    let text = toml::to_string(&recipe).unwrap();
    assert_eq!(Recipe::parse(&text, Path::new(""), &[]).unwrap(), recipe, "{text}");
    let plan = recipe.sparsity_plan().unwrap();
    assert_eq!(plan.layers, ["blocks.0.mlp.up", "blocks.0.mlp.down"]);
    assert_eq!((plan.method, plan.begin, plan.mask_every), (Method::SPARSIFIER, SparseBegin::Step(200), 10));
    let own = plan.sparsifier.as_ref().unwrap();
    assert_eq!(own.rule, SparsifierRule::WeightNorm { block: [4, 8], zeros: 24, norm: BlockNorm::L1 });
    assert_eq!(own.schedule, LevelSchedule::Cubic { start_level: 0.1, start: 200, steps: 400 });
    assert!(!own.in_place && (own.level_at(200) - 0.1).abs() < 1e-12);
    assert_eq!((own.level_at(600), own.level_at(900)), (0.75, 0.75));
    let other = plan.part_of("blocks.1.mlp.down").unwrap();
    assert_eq!((other.begin, other.mask_every), (SparseBegin::Step(500), 0));
    let own = other.sparsifier.as_ref().unwrap();
    assert_eq!(own.rule, SparsifierRule::NearlyDiagonal { nearliness: 5 });
    assert!(own.in_place && own.schedule == LevelSchedule::OneShot { step: 500 });
    let plan = recipe.plan(DeviceKind::Cuda);
    assert_eq!((plan.sparse_weights, plan.masked_weights), (0, 4 * 64 * 256));
    let reason = |name: &str| plan.layers.iter().find(|layer| layer.name == name).unwrap().reason.clone();
    assert_eq!(reason("blocks.0.mlp.up"), "prunes 24 of 32 in blocks [4, 8]");
    assert_eq!(reason("blocks.1.mlp.up"), "prunes all but 5 diagonals, by an override");
    assert_eq!(plan.levels.len(), 2);
    let (first, level) = plan.levels[0].levels[0];
    assert!(first == 200 && (level - 0.1).abs() < 1e-12, "{first}: {level}");
    assert_eq!(plan.levels[0].levels.last(), Some(&(600, 0.75)));
    assert!(plan.levels[1].in_place && plan.levels[1].levels == [(500, 1.0)]);
    // Bits of the masks beside the dense copies.
    assert_eq!(plan.memory.packed, 4 * 64 * 256 / 8);
    // Dense GEMMs are in f32, too.
    assert!(parse(RICH, &["training.precision=f32"]).unwrap().compute_type(DeviceKind::Cuda).is_ok());
}

#[test]
fn a_criterion_is_read_and_shown_and_needs_the_gradient_of_a_step() {
    let text = RICH.replacen("norm = 'l1'", "criterion = 'saliency'", 1);
    let recipe = parse(&text, &[]).unwrap();
    let plan = recipe.sparsity_plan().unwrap();
    assert_eq!(plan.sparsifier.as_ref().unwrap().criterion, SparsifierCriterion::Saliency);
    let shown = recipe.plan(DeviceKind::Cpu);
    assert_eq!(shown.levels[0].rule, "24 of 32 in blocks [4, 8], of weights times gradients");
    assert_eq!(shown.layers[2].reason, "prunes 24 of 32 in blocks [4, 8], of weights times gradients");
    // The band of the override does not depend on weights.
    let band = plan.part_of("blocks.1.mlp.up").unwrap().sparsifier.as_ref().unwrap();
    assert_eq!(band.criterion, SparsifierCriterion::Magnitude);
    let saliency =
        ["sparsity.method=sparsifier", "sparsity.sparsifier.kind='2:4'", "sparsity.sparsifier.criterion=saliency"];
    assert_eq!(parse(GOOD, &saliency).unwrap().sparsity_plan().unwrap().begin, SparseBegin::Step(1));
    let found = lines(parse(GOOD, &[&saliency[..], &["sparsity.begin=0"]].concat()));
    assert!(
        found.len() == 1 && found[0].contains("sparsity.begin: found the first step, expected a later one"),
        "{found:?}"
    );
    let shares =
        ["sparsity.sparsifier.schedule=steps", "sparsity.sparsifier.at=[0]", "sparsity.sparsifier.factors=[1]"];
    let found = lines(parse(GOOD, &[&saliency[..], &shares[..]].concat()));
    assert!(found.len() == 1 && found[0].contains("sparsity.sparsifier.at: found the first step"), "{found:?}");
}

#[test]
fn kinds_and_schedules_have_their_defaults() {
    let plan = |overrides: &[&str]| {
        let all: Vec<&str> = ["sparsity.method=sparsifier"].iter().chain(overrides).copied().collect();
        parse(GOOD, &all).unwrap().sparsity_plan().unwrap()
    };
    let two = plan(&["sparsity.sparsifier.kind='2:4'"]);
    assert_eq!((two.begin, two.mask_every), (SparseBegin::Step(0), 1));
    assert_eq!(two.sparsifier, Some(crate::train::SparsifierPlan::TWO_OF_FOUR));
    let norm = plan(&["sparsity.sparsifier.kind=weight-norm"]).sparsifier.unwrap();
    assert_eq!(norm.rule, SparsifierRule::WeightNorm { block: [1, 4], zeros: 4, norm: BlockNorm::L2 });
    assert_eq!(norm.level, 0.5);
    let shot = plan(&["sparsity.sparsifier.kind=unstructured", "sparsity.sparsifier.schedule=one-shot"]);
    assert_eq!((shot.begin, shot.mask_every), (SparseBegin::Step(50), 0));
    let rises = plan(&["sparsity.sparsifier.kind=unstructured", "sparsity.sparsifier.schedule=iterative"]);
    let schedule = LevelSchedule::Iterative { start: 10, every: 21, rounds: 4 };
    assert_eq!((rises.begin, rises.sparsifier.as_ref().unwrap().schedule.clone()), (SparseBegin::Step(10), schedule));
    assert!([10, 31, 52, 73].iter().all(|step| rises.selects_mask_after(*step)) && !rises.selects_mask_after(94));
    let steps = plan(&[
        "sparsity.sparsifier.kind=unstructured",
        "sparsity.sparsifier.schedule=steps",
        "sparsity.sparsifier.at=[0.1, 0.5]",
        "sparsity.sparsifier.factors=[0.5, 1]",
        "sparsity.mask_every=7",
    ]);
    assert_eq!((steps.begin, steps.mask_every), (SparseBegin::Step(10), 7));
    let own = steps.sparsifier.as_ref().unwrap();
    assert_eq!((own.level_at(10), own.level_at(49), own.level_at(50)), (0.25, 0.25, 0.5));
    assert!(steps.selects_mask_after(50) && steps.selects_mask_after(49) && !steps.selects_mask_after(51));
}

#[test]
fn every_pattern_is_a_rule_whose_level_is_its_share() {
    let of = |more: &[&str]| {
        let all = [&["sparsity.method=sparsifier", "sparsity.sparsifier.kind=pattern"], more].concat();
        parse(GOOD, &all)
    };
    for (pattern, level) in [
        ("4:8", 1.0),
        ("4:2:8", 1.0),
        ("block:8x8@0.75", 0.75),
        ("rows@0.25", 0.25),
        ("columns@0.5", 0.5),
        ("unstructured@0.6", 0.6),
        ("unstructured-rows@0.6", 0.6),
    ] {
        let key = format!("sparsity.sparsifier.pattern='{pattern}'");
        let recipe = of(&[&key]).unwrap();
        let own = recipe.sparsity_plan().unwrap().sparsifier.unwrap();
        assert_eq!((own.rule, own.level), (SparsifierRule::Pattern(PatternText(pattern.parse().unwrap())), level));
        assert_eq!(own.to_string(), format!("to {pattern}"));
        let text = toml::to_string(&recipe).unwrap();
        assert_eq!(Recipe::parse(&text, Path::new(""), &[]).unwrap(), recipe, "{text}");
        let stored: SparsifierRule = serde_json::from_str(&serde_json::to_string(&own.rule).unwrap()).unwrap();
        assert_eq!(stored, own.rule);
        // V:N:M has no lower level.
        let rises = of(&[&key, "sparsity.sparsifier.schedule=cubic"]);
        assert_eq!(rises.is_ok(), pattern != "4:2:8", "{pattern}");
    }
    for (more, word) in [
        (&[][..], "pattern: is missing"),
        (&["sparsity.sparsifier.pattern='block:8@0.5'"], "block:64x64@0.8"),
        (&["sparsity.sparsifier.pattern='rows@1.5'"], "share from 0 to 1"),
        (&["sparsity.sparsifier.pattern=4"], "unstructured@0.5"),
        (
            &["sparsity.sparsifier.pattern='rows@0.5'", "sparsity.sparsifier.level=0.5"],
            "the share stands in the pattern",
        ),
        (&["sparsity.sparsifier.pattern='4:8'", "sparsity.sparsifier.block=[1, 4]"], "only \"weight-norm\""),
        (&["sparsity.sparsifier.pattern='4:8'", "sparsity.sparsifier.kind=unstructured"], "only \"pattern\" has one"),
        (&["sparsity.sparsifier.pattern='4:2:8'", "sparsity.sparsifier.schedule=cubic"], "no lower level"),
    ] {
        let found = lines(of(more));
        assert!(found.len() == 1 && found[0].contains(word), "{word}: {found:?}");
    }
}

#[test]
fn an_override_takes_what_it_leaves_out_from_the_section_of_the_same_kind() {
    let section = SparsifierSettings {
        kind: Some(SparsifierKind::WeightNorm),
        block: Some([2, 2]),
        level: Some(0.7),
        in_place: Some(true),
        ..Default::default()
    };
    let own = SparsifierSettings { level: Some(0.2), ..Default::default() };
    let same = own.over(&section);
    assert_eq!((same.kind, same.block, same.level), (section.kind, section.block, Some(0.2)));
    let own = SparsifierSettings { kind: Some(SparsifierKind::Unstructured), ..Default::default() };
    let other = own.over(&section);
    assert_eq!((other.kind, other.block, other.level, other.in_place), (own.kind, None, None, Some(true)));
    // Times of the section are for its schedule.
    let text = RICH.replace("begin = 0.5\n", "").replace("begin = 0.2", "begin = 0.2\nmask_every = 20");
    let plan = parse(&text, &[]).unwrap().sparsity_plan().unwrap();
    let other = plan.part_of("blocks.1.mlp.up").unwrap();
    assert_eq!((plan.begin, plan.mask_every), (SparseBegin::Step(200), 20));
    assert_eq!((other.begin, other.mask_every), (SparseBegin::Step(500), 0));
}

#[test]
fn every_mistake_is_named_with_its_line() {
    for (from, to, expected) in [
        (
            "kind = 'weight-norm'",
            "kind = 'weigth-norm'",
            "line 15: sparsity.sparsifier.kind: found \"weigth-norm\"; did you mean `weight-norm`?",
        ),
        ("kind = 'weight-norm'\n", "", "line 14: sparsity.sparsifier.kind: is missing: the rule of masks"),
        (
            "zeros_per_block = 24",
            "zeros_per_blok = 24",
            "line 17: sparsity.sparsifier.zeros_per_blok: unknown key; did you mean `zeros_per_block`?",
        ),
        (
            "zeros_per_block = 24",
            "zeros_per_block = 33",
            "line 17: sparsity.sparsifier.zeros_per_block: found 33, expected at most the 32 elements",
        ),
        (
            "block = [4, 8]",
            "block = [4]",
            "line 16: sparsity.sparsifier.block: found a list of 1, expected rows and columns: a list of 2 whole \
             numbers from 1",
        ),
        ("block = [4, 8]", "block = [0, 8]", "line 16: sparsity.sparsifier.block"),
        (
            "norm = 'l1'",
            "criterion = 'saliensy'",
            "line 18: sparsity.sparsifier.criterion: found \"saliensy\"; did you mean `saliency`?",
        ),
        (
            "nearliness = 5",
            "criterion = 'saliency'",
            "line 29: sparsity.override.sparsifier.criterion: excluded by the kind \"nearly-diagonal\"",
        ),
        ("level = 0.75", "level = 1.5", "line 19: sparsity.sparsifier.level: found 1.5, expected a share from 0 to 1"),
        (
            "level = 0.75",
            "nearliness = 3",
            "line 19: sparsity.sparsifier.nearliness: excluded by the kind \"weight-norm\"",
        ),
        (
            "schedule = 'cubic'",
            "schedule = 'cubicle'",
            "line 20: sparsity.sparsifier.schedule: found \"cubicle\"; did you mean `cubic`?",
        ),
        (
            "start_level = 0.1",
            "start_level = 0.8",
            "line 21: sparsity.sparsifier.start_level: found 0.8, expected at most the level 0.75",
        ),
        ("start_level = 0.1", "rounds = 4", "line 21: sparsity.sparsifier.rounds: excluded by the schedule \"cubic\""),
        (
            "until = 0.6",
            "until = 0.1",
            "line 22: sparsity.sparsifier.until: the level would be reached at step 100 of 1000",
        ),
        ("begin = 0.2", "mask = 'magnitude'", "line 13: sparsity.mask: excluded by the method \"sparsifier\""),
        ("begin = 0.2", "observe = true", "line 13: sparsity.observe: excluded by the method \"sparsifier\""),
        (
            "begin = 0.2",
            "weight_gradient = 'mvue'",
            "line 13: sparsity.weight_gradient: excluded by the method \"sparsifier\"",
        ),
        ("begin = 0.2", "precision = 'fp8'", "line 13: sparsity.precision: excluded by the method \"sparsifier\""),
        ("begin = 0.2", "decay = 1e-4", "line 13: sparsity.decay: excluded by the method \"sparsifier\""),
        (
            "nearliness = 5",
            "nearliness = 4",
            "line 29: sparsity.override.sparsifier.nearliness: found 4, expected an odd number",
        ),
        ("nearliness = 5\n", "", "line 27: sparsity.override.sparsifier.nearliness: is missing"),
        (
            "nearliness = 5",
            "nearliness = 129",
            "line 29: sparsity.override.sparsifier.nearliness: found 129, expected at most the 127 diagonals of \
             \"blocks.1.mlp.up\"",
        ),
        (
            "schedule = 'one-shot'",
            "schedule = 'iterative'",
            "line 30: sparsity.override.sparsifier.schedule: excluded by the kind \"nearly-diagonal\"",
        ),
        (
            "weight_gradient = 'masked'",
            "weight_gradient = 'dense'",
            "line 26: sparsity.override.weight_gradient: excluded by in_place",
        ),
        (
            "weight_gradient = 'masked'",
            "mask_every = 9",
            "line 26: sparsity.override.mask_every: excluded by the schedule \"one-shot\"",
        ),
        (
            "in_place = true",
            "in_place = 1",
            "line 31: sparsity.override.sparsifier.in_place: found 1, expected true or false",
        ),
        (
            "layers = ['blocks.1.mlp.*']",
            "layers = ['blocks.1.mpl.*']",
            "matches no linear layer; the closest names are",
        ),
    ] {
        let wrong = RICH.replacen(from, to, 1);
        assert_ne!(wrong, RICH, "{from}");
        let found = lines(parse(&wrong, &[]));
        assert!(found.iter().any(|line| line.contains(expected)), "{to}: {found:#?}");
    }
    // Several at once.
    let found =
        lines(parse(&RICH.replace("kind = 'weight-norm'", "kynd = 'x'").replace("level = 0.75", "level = 7"), &[]));
    assert!(found.len() >= 3, "{found:#?}");
    let steps = ["sparsity.method=sparsifier", "sparsity.sparsifier.kind='2:4'", "sparsity.sparsifier.schedule=steps"];
    let with = |more: &[&'static str]| lines(parse(GOOD, &[&steps[..], more].concat()));
    assert!(with(&[]).iter().filter(|line| line.contains("is missing")).count() == 2);
    let shares = ["sparsity.sparsifier.at=[0.5, 0.1]", "sparsity.sparsifier.factors=[1]"];
    let found = with(&shares);
    for word in ["ascending", "as many as `at` has, 2"] {
        assert!(found.iter().any(|line| line.contains(word)), "{word}: {found:#?}");
    }
    let found = with(&[&shares[..], &["sparsity.begin=0.1"]].concat());
    assert!(found.iter().any(|line| line.contains("the first of `at` is the beginning")), "{found:#?}");
    // A section that nothing uses, and a value in its place.
    let found = lines(parse(GOOD, &["sparsity.sparsifier.kind='2:4'"]));
    assert!(found.len() == 1 && found[0].contains("which nothing here has"), "{found:?}");
    let found = lines(parse(GOOD, &["sparsity.method=sparsifier", "sparsity.sparsifier=3"]));
    assert!(found.iter().any(|line| line.contains("expected a section, [sparsity.sparsifier]")), "{found:?}");
    assert!(lines(parse(GOOD, &["sparsity.method=sparsifier"]))[0].contains("sparsity.sparsifier.kind: is missing"));
}
