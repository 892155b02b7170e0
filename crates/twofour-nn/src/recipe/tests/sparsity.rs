//! Overrides, searched decay, and STEP's bounds.

use std::path::Path;

use twofour::{layer::MaskRule, select::Transposable};

use super::{GOOD, lines, one, parse};
use crate::{
    recipe::{Method, Recipe, SwitchMean},
    train::SparseBegin,
};

/// Everything that a recipe can say about sparsity beside its method.
const RICH: &str = "\
decay = 'auto'
decay_grid = [1e-5, 1e-4]
decay_trial_steps = 12
observe = true
defaults = '2by4-pretrain'
end = 0.9

[[sparsity.override]]
layers = ['blocks.0.mlp.up']
method = 'gradual'
begin = 0.2
two_of_four_from = 0.5

[[sparsity.override]]
layers = ['blocks.1.mlp.*', 'head']
mask_every = 5
end = 0.5

[[sparsity.override]]
layers = ['blocks.0.mlp.down']
method = 'dense'
";

#[test]
fn layers_have_plans_of_their_own() {
    let recipe = parse(&format!("{GOOD}{RICH}"), &["training.optimizer=sgd", "training.momentum=0.8"]).unwrap();
    let text = toml::to_string(&recipe).unwrap();
    assert_eq!(Recipe::parse(&text, Path::new(""), &[]).unwrap(), recipe, "{text}");
    assert_eq!(toml::from_str::<Recipe>(&text).unwrap(), recipe);
    let plan = recipe.sparsity_plan().unwrap();
    // Feed-forward layers but for those of the overrides: none is left.
    assert!(plan.layers.is_empty() && plan.overrides.len() == 3);
    let gradual = plan.part_of("blocks.0.mlp.up").unwrap();
    assert_eq!(
        (gradual.method, gradual.begin, gradual.two_of_four_from),
        (Method::GRADUAL, SparseBegin::Step(20), Some(50))
    );
    let fst = plan.part_of("head").unwrap();
    assert_eq!((fst.method, fst.mask_every, fst.end), (Method::FST, 5, Some(50)));
    assert_eq!(fst.rule, MaskRule::Transposable(Transposable::Optimal), "the toolkit's");
    assert_eq!(plan.part_of("blocks.0.mlp.down").map(|part| (part.method, part.observes)), Some((Method::DENSE, true)));
    let search = recipe.decay_search().unwrap();
    assert_eq!((search.grid, search.steps), (vec![1e-5, 1e-4], 12));
    let sparse: Vec<String> = recipe.layers().into_iter().filter(|l| l.sparse).map(|l| l.name).collect();
    assert_eq!(sparse, ["blocks.0.mlp.up", "blocks.1.mlp.up", "blocks.1.mlp.down", "head"]);
}

#[test]
fn mistakes_of_overrides_and_searches_have_their_line_and_near_misses() {
    let text = format!("{GOOD}{RICH}");
    for (from, to, expected) in [
        (
            "method = 'gradual'",
            "method = 'gradul'",
            "line 26: sparsity.override.method: found \"gradul\"; did you mean `gradual`?",
        ),
        (
            "method = 'gradual'",
            "metod = 'gradual'",
            "line 26: sparsity.override.metod: unknown key; did you mean `method`?",
        ),
        ("method = 'gradual'", "method = 'step'", "line 26: sparsity.override.method: found \"step\""),
        (
            "layers = ['blocks.0.mlp.up']",
            "layers = ['blocks.0.mpl.up']",
            "line 25: sparsity.override.layers: \"blocks.0.mpl.up\" matches no linear layer; the closest names are",
        ),
        (
            "layers = ['blocks.0.mlp.up']",
            "layers = ['blocks.*.mlp.up']",
            "line 31: sparsity.override.layers: \"blocks.1.mlp.up\" is in an earlier override too",
        ),
        ("layers = ['blocks.0.mlp.up']", "layers = []", "line 25: sparsity.override.layers: found an empty list"),
        ("layers = ['blocks.0.mlp.up']\n", "", "sparsity.override.layers: is missing"),
        (
            "two_of_four_from = 0.5",
            "two_of_four_from = 0.1",
            "line 28: sparsity.override.two_of_four_from: groups would keep two of four from step 10 on",
        ),
        ("mask_every = 5", "decay = 1e-4", "line 32: sparsity.override.decay: the section's trial runs"),
        (
            "mask_every = 5",
            "mask_every = 500",
            "line 32: sparsity.override.mask_every: found 500, beyond the run of 100 steps",
        ),
        (
            "decay = 'auto'",
            "decay = 'atuo'",
            "line 17: sparsity.decay: found \"atuo\", expected a number from 0 up or \"auto\"; did you mean `auto`?",
        ),
        ("decay = 'auto'", "decay = 1e-4", "line 18: sparsity.decay_grid: trial runs are for decay = \"auto\""),
        (
            "decay_grid = [1e-5, 1e-4]",
            "decay_grid = []",
            "line 18: sparsity.decay_grid: found a list, expected a list of at least one number, each a number above 0",
        ),
        (
            "decay_grid = [1e-5, 1e-4]",
            "decay_grid = [1e-5, 'x']",
            "line 18: sparsity.decay_grid: found \"x\" as element 2 of the list, expected a number above 0",
        ),
        (
            "decay_trial_steps = 12",
            "decay_trial_steps = 101",
            "line 19: sparsity.decay_trial_steps: found 101, beyond the run of 100 steps",
        ),
        ("observe = true", "observe = 'yes'", "line 20: sparsity.observe: found \"yes\", expected true or false"),
        ("defaults = '2by4-pretrain'", "defaults = '2by4'", "line 21: sparsity.defaults: found \"2by4\"; "),
    ] {
        let wrong = text.replace(from, to);
        assert_ne!(wrong, text, "{from}");
        let found = lines(parse(&wrong, &[]));
        assert!(found.iter().any(|line| line.contains(expected)), "{to}: {found:#?}");
    }
    let found = lines(parse(GOOD, &["sparsity.override=5"]));
    assert_eq!(found, ["override: sparsity.override: found 5, expected tables, [[sparsity.override]]"]);
}

#[test]
fn steps_switch_is_bounded_by_the_recipe() {
    let plan = |overrides: &[&str]| {
        let overrides: Vec<&str> = [&["sparsity.method=step"], overrides].concat();
        parse(GOOD, &overrides).unwrap().sparsity_plan().unwrap()
    };
    let own = plan(&[]);
    assert_eq!(
        (own.begin, own.switch_mean),
        (SparseBegin::Settled { earliest: 10, latest: 50 }, SwitchMean::Arithmetic)
    );
    let given = plan(&["sparsity.begin=0.2", "sparsity.switch_latest=0.3", "sparsity.switch_mean=geometric"]);
    assert_eq!(
        (given.begin, given.switch_mean),
        (SparseBegin::Settled { earliest: 20, latest: 30 }, SwitchMean::Geometric)
    );
    // Without bounds, as the toolkit has it. What is beyond the end is the fault of the later bound.
    let unbounded = plan(&["sparsity.begin=0", "sparsity.switch_latest=1"]);
    assert_eq!(unbounded.begin, SparseBegin::Settled { earliest: 0, latest: 100 });
    let found = one(&["sparsity.method=step", "sparsity.begin=1", "sparsity.switch_latest=1"]);
    assert!(found.contains("sparsity.begin"), "{found}");
    let found = one(&["sparsity.method=step", "sparsity.switch_latest=0.9", "sparsity.end=0.8"]);
    assert!(found.contains("sparsity.end"), "{found}");
    let found = one(&["sparsity.method=step", "sparsity.switch_latest=0.05"]);
    assert!(found.contains("at the latest at step 5"), "{found}");
    let found = one(&["sparsity.method=activation", "sparsity.layers=['blocks.*.mlp.*']"]);
    assert!(found.contains("blocks.0.mlp.up") && found.contains("blocks.*.mlp.down"), "{found}");
    let found = one(&["sparsity.method=ste", "sparsity.precision=fp9"]);
    assert!(found.contains("did you mean `fp8`"), "{found}");
    let found = one(&["sparsity.method=step", "training.optimizer=sgd"]);
    assert!(found.contains("second moments"), "{found}");
    let found = one(&["sparsity.method=step", "training.optimizer=sgdm"]);
    assert!(found.contains("did you mean `sgd`"), "{found}");
}

#[test]
fn squared_relu_takes_the_place_of_an_activation_without_a_gate() {
    let llama = ["model.kind=llama", "sparsity.method=activation"];
    assert!(parse(GOOD, &llama[1..]).is_ok());
    let lines = lines(parse(GOOD, &llama));
    assert!(lines.len() == 1 && lines[0].contains("sparsity.method") && lines[0].contains("has gates"), "{lines:?}");
    let own = "[[sparsity.override]]\nlayers = ['blocks.0.mlp.down']\nmethod = 'activation'\n";
    let text = format!("{GOOD}\n{own}");
    assert!(parse(&text, &[]).is_ok());
    let lines = crate::recipe::tests::lines(parse(&text, &llama[..1]));
    assert!(lines.len() == 1 && lines[0].contains("sparsity.override.method"), "{lines:?}");
}

#[test]
fn the_plan_says_when_each_part_is_sparse() {
    use crate::recipe::{DeviceKind, StagePlan};
    let plan = parse(&format!("{GOOD}{RICH}"), &[]).unwrap().plan(DeviceKind::Cpu);
    let of =
        |stage: &StagePlan| (stage.method, stage.earliest(), stage.two_of_four_from, stage.end, stage.layers.len());
    let stages: Vec<_> = plan.stages.iter().map(of).collect();
    assert_eq!(stages, [("gradual", 20, Some(50), 100, 1), ("fst", 0, None, 50, 3)]);
    // From the first that becomes sparse to the last that becomes dense.
    assert_eq!(plan.sparse, Some((SparseBegin::Step(0), 100)));
    let never = parse(GOOD, &["sparsity.method=dense"]).unwrap().plan(DeviceKind::Cpu);
    assert_eq!((never.sparse, never.stages.len()), (None, 0));
}
