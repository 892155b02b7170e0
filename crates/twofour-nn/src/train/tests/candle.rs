//! The first steps, against those of an earlier trainer.

use super::{layers, steps, trainer};
use crate::train::{SparsityPlan, methods::Method};

/// Losses and gradient norms of the trainer over candle that this one replaced, from the same seeds, text and settings
/// (whose masks follow the same schedule), on an AVX-512 machine: the first 20 steps.
const CANDLE: [(&str, [(f64, f64); 20]); 3] = [
    (
        "dense",
        [
            (5.5341077, 3.707004),
            (5.4699283, 3.423570),
            (5.3465776, 2.334601),
            (5.2590303, 1.937668),
            (5.150262, 1.977455),
            (5.069727, 1.816794),
            (4.88346, 2.196071),
            (4.7269015, 2.033878),
            (4.5980816, 2.059624),
            (4.523237, 1.691027),
            (4.371215, 1.785421),
            (4.238595, 1.716301),
            (4.1537423, 1.730840),
            (4.0024285, 1.636659),
            (3.8621385, 2.040891),
            (3.7401829, 1.758908),
            (3.6124122, 1.971216),
            (3.4907527, 1.831837),
            (3.419669, 1.652366),
            (3.4013495, 1.544767),
        ],
    ),
    (
        "magnitude",
        [
            (5.5349326, 3.639481),
            (5.472856, 3.338566),
            (5.356362, 2.382242),
            (5.2674465, 1.962641),
            (5.159993, 1.980333),
            (5.0791807, 1.845341),
            (4.889463, 2.165206),
            (4.725715, 1.932790),
            (4.6106257, 2.394991),
            (4.537957, 1.879551),
            (4.380291, 1.840399),
            (4.2479963, 1.755546),
            (4.1660104, 1.785455),
            (4.013536, 1.648788),
            (3.868064, 1.886017),
            (3.7486055, 1.776298),
            (3.624879, 1.907897),
            (3.4992526, 1.817846),
            (3.4253623, 1.640147),
            (3.413217, 1.577980),
        ],
    ),
    (
        "soft",
        [
            (5.5345316, 3.602209),
            (5.4733667, 3.317473),
            (5.3593965, 2.403289),
            (5.2716966, 1.989086),
            (5.16186, 1.937351),
            (5.082155, 1.826847),
            (4.8904285, 2.109991),
            (4.726956, 1.953475),
            (4.6242876, 2.783748),
            (4.5367513, 1.850449),
            (4.3820176, 1.916260),
            (4.249384, 1.740600),
            (4.1667747, 1.760513),
            (4.014129, 1.635226),
            (3.8653212, 1.732564),
            (3.7476227, 1.749239),
            (3.6216593, 1.837248),
            (3.4998364, 1.800137),
            (3.425239, 1.639109),
            (3.412837, 1.596061),
        ],
    ),
];

#[test]
fn the_first_steps_are_those_of_the_trainer_over_candle() {
    for (name, expected) in CANDLE {
        let plan = match name {
            "dense" => SparsityPlan::dense(),
            "magnitude" => SparsityPlan::of_method(Method::STE, layers(), 60),
            _ => SparsityPlan::of_method(Method::S_STE, layers(), 60),
        };
        for (report, (loss, norm)) in steps(&mut trainer(&plan), 20).iter().zip(expected) {
            // Engines of other instruction sets add in another order, and differences grow from step to step.
            let distance = ((report.loss - loss) / loss).abs().max(((report.gradient_norm - norm) / norm).abs());
            let tolerance = 1e-5 * (1 + report.step).pow(2) as f64;
            assert!(distance < tolerance, "{name}, step {}: {} and {}", report.step, report.loss, report.gradient_norm);
        }
    }
}
