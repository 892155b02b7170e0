//! Settings of a sparsifier against each other and against the run.

use twofour::{layer::WeightGradient, select::Sparsity};

use super::{
    super::{CheckedPart, step_of},
    LevelScheduleKind, SparsifierCriterion, SparsifierKind, SparsifierPlan, SparsifierSettings,
};
use crate::settings::{Mistakes, name_of};

impl CheckedPart<'_> {
    fn own_key(&self, key: &str) -> String {
        format!("{}.sparsifier.{key}", self.name)
    }

    fn add_own(&self, m: &mut Mistakes, key: &str, problem: impl Into<String>) {
        m.add(self.sparsifier.place(key), self.own_key(key), problem);
    }

    fn missing(&self, m: &mut Mistakes, key: &str, what: &str) {
        if !m.has(&self.own_key(key)) {
            m.add(self.sparsifier.own_place(), self.own_key(key), format!("is missing: {what}"));
        }
    }

    /// Notes every contradiction.
    pub(super) fn check_sparsifier(&self, m: &mut Mistakes) {
        let own = self.settings.sparsifier.clone().unwrap_or_default();
        let Some(kind) = own.kind else {
            let kinds = "the rule of masks, \"2:4\", \"weight-norm\", \"unstructured\", \"nearly-diagonal\" or \
                         \"pattern\"";
            self.missing(m, "kind", kinds);
            return;
        };
        self.check_rule(kind, &own, m);
        if !m.has(&self.own_key("schedule")) {
            self.check_schedule(kind, &own, m);
            self.check_levels(&own, m);
        }
        if own.in_place == Some(true) && self.settings.weight_gradient == Some(WeightGradient::Dense) {
            let problem = "excluded by in_place: what is pruned stays zero, so its gradient is masked";
            m.add(self.section.place("weight_gradient"), format!("{}.weight_gradient", self.name), problem);
        }
    }

    fn check_rule(&self, kind: SparsifierKind, own: &SparsifierSettings, m: &mut Mistakes) {
        let is_norm = kind == SparsifierKind::WeightNorm;
        let is_diagonal = kind == SparsifierKind::NearlyDiagonal;
        let is_pattern = kind == SparsifierKind::Pattern;
        let blocks = "only \"weight-norm\" has blocks of its own";
        for (key, is_given, why) in [
            ("criterion", own.criterion.is_some() && is_diagonal, "its band does not depend on weights"),
            ("level", own.level.is_some() && is_diagonal, "its band does not depend on a level"),
            ("level", own.level.is_some() && is_pattern, "the share stands in the pattern"),
            ("pattern", own.pattern.is_some() && !is_pattern, "only \"pattern\" has one"),
            ("block", own.block.is_some() && !is_norm, blocks),
            ("zeros_per_block", own.zeros_per_block.is_some() && !is_norm, blocks),
            ("norm", own.norm.is_some() && !is_norm, blocks),
            ("nearliness", own.nearliness.is_some() && !is_diagonal, "only \"nearly-diagonal\" has a band"),
        ] {
            if is_given {
                self.add_own(m, key, format!("excluded by the kind \"{}\": {why}", name_of(kind)));
            }
        }
        if is_pattern && own.pattern.is_none() {
            self.missing(m, "pattern", "what is pruned, \"block:16x16@0.8\" for instance");
        }
        let elements = own.block.map_or(4, |[rows, cols]| rows.saturating_mul(cols));
        if let Some(zeros) = own.zeros_per_block.filter(|zeros| is_norm && *zeros > elements) {
            let problem = format!("found {zeros}, expected at most the {elements} elements of a block");
            self.add_own(m, "zeros_per_block", problem);
        }
        match own.nearliness {
            None if is_diagonal => self.missing(m, "nearliness", "the number of diagonals of the band, an odd one"),
            Some(even) if is_diagonal && even.is_multiple_of(2) => {
                let problem = format!("found {even}, expected an odd number: as many diagonals on either side");
                self.add_own(m, "nearliness", problem);
            }
            _ => {}
        }
    }

    fn check_schedule(&self, kind: SparsifierKind, own: &SparsifierSettings, m: &mut Mistakes) {
        use LevelScheduleKind::{Constant, Cubic, Iterative, OneShot, Steps};
        let schedule = own.schedule.unwrap_or_default();
        let ends = matches!(schedule, Cubic | Iterative);
        for (key, is_given, why) in [
            ("start_level", own.start_level.is_some() && schedule != Cubic, "only \"cubic\" starts at a level"),
            ("until", own.until.is_some() && !ends, "only \"cubic\" and \"iterative\" go to their level over steps"),
            ("rounds", own.rounds.is_some() && schedule != Iterative, "only \"iterative\" has rounds"),
            ("at", own.at.is_some() && schedule != Steps, "only \"steps\" has them"),
            ("factors", own.factors.is_some() && schedule != Steps, "only \"steps\" has them"),
        ] {
            if is_given {
                self.add_own(m, key, format!("excluded by the schedule \"{}\": {why}", name_of(schedule)));
            }
        }
        let is_diagonal = kind == SparsifierKind::NearlyDiagonal;
        if is_diagonal && !matches!(schedule, Constant | OneShot) {
            self.add_own(
                m,
                "schedule",
                "excluded by the kind \"nearly-diagonal\": its band does not depend on a level",
            );
        }
        let has_levels = !own.pattern.is_some_and(|pattern| matches!(pattern.0, Sparsity::Vectors { .. }));
        if !has_levels && !matches!(schedule, Constant | OneShot) {
            self.add_own(m, "schedule", "excluded by a pattern V:N:M: it has no lower level");
        }
        for (key, is_given, why) in [
            ("mask_every", schedule == OneShot, "excluded by the schedule \"one-shot\": its mask is chosen once"),
            ("mask_every", is_diagonal, "excluded by the kind \"nearly-diagonal\": its band does not change"),
            ("begin", schedule == Steps, "excluded by the schedule \"steps\": the first of `at` is the beginning"),
        ] {
            let is_set = match key {
                "begin" => self.settings.begin.is_some(),
                _ => self.settings.mask_every.is_some(),
            };
            if is_given && is_set {
                m.add(self.section.place(key), format!("{}.{key}", self.name), why);
            }
        }
        let level = own.target();
        if let Some(start) = own.start_level.filter(|start| schedule == Cubic && *start > level) {
            self.add_own(
                m,
                "start_level",
                format!("found {start}, expected at most the level {level} that it goes to"),
            );
        }
        if schedule != Steps {
            return;
        }
        for (key, is_given) in [("at", own.at.is_some()), ("factors", own.factors.is_some())] {
            if !is_given {
                self.missing(m, key, "shares of all steps, and for each the share of the level from there on");
            }
        }
        if let (Some(at), Some(factors)) = (&own.at, &own.factors)
            && at.len() != factors.len()
        {
            let problem = format!("found {}, expected as many as `at` has, {}", factors.len(), at.len());
            self.add_own(m, "factors", problem);
        }
    }

    /// The steps at which the level changes, within those in which layers are masked.
    fn check_levels(&self, own: &SparsifierSettings, m: &mut Mistakes) {
        use LevelScheduleKind::{Cubic, Iterative, Steps};
        if m.has("training.steps") || ["begin", "end"].iter().any(|key| m.has(&format!("{}.{key}", self.name))) {
            return;
        }
        let (schedule, steps) = (own.schedule.unwrap_or_default(), self.steps);
        let step_of = |share: f64| step_of(share, steps);
        let begin = self.settings.begin.map_or_else(|| SparsifierPlan::default_begin(own, steps), step_of);
        let end = self.settings.end.map_or(steps, step_of);
        let until = SparsifierPlan::until(own, steps);
        if own.criterion.is_some_and(SparsifierCriterion::reads_gradient) && begin == 0 {
            let problem = "found the first step, expected a later one: with the criterion \"saliency\" masks are \
                           chosen by the gradient of the step before";
            match schedule {
                Steps => self.add_own(m, "at", problem),
                _ => m.add(self.section.place("begin"), format!("{}.begin", self.name), problem),
            }
        }
        match schedule {
            Cubic | Iterative if !(begin..=end).contains(&until) || (schedule == Cubic && until == begin) => {
                let problem = format!(
                    "the level would be reached at step {until} of {steps}, expected a step after {begin}, where \
                     layers are masked first, and at most {end}"
                );
                self.add_own(m, "until", problem);
            }
            Iterative if own.rounds.unwrap_or(SparsifierSettings::ROUNDS).saturating_sub(1) > until - begin => {
                let rounds = own.rounds.unwrap_or(SparsifierSettings::ROUNDS);
                self.add_own(m, "rounds", format!("found {rounds}, beyond the {} steps that they have", until - begin));
            }
            Steps => {
                let at: Vec<u64> = own.at.iter().flatten().map(|share| step_of(*share)).collect();
                if !at.is_sorted_by(|a, b| a < b) || at.last().is_some_and(|last| *last >= end) {
                    let problem = format!("found the steps {at:?}, expected ascending ones before step {end}");
                    self.add_own(m, "at", problem);
                }
            }
            _ => {}
        }
    }
}
