//! The switch of STEP from dense to sparse training.

use pyo3::{exceptions::PyValueError, prelude::*};
use twofour::adamw_step::{ChangeMean, PhaseSwitch};

/// Decides when the variances of masked parameters have settled (STEP, Lu et al., ICML 2023).
#[pyclass]
pub(crate) struct StepSwitch(PhaseSwitch);

#[pymethods]
impl StepSwitch {
    /// A switch after `steps` steps. `window` is the number of steps whose changes count, `option` 1 for the arithmetic
    /// and 2 for the geometric mean, `bounds` the steps after which it may and must happen, `changes` the last of the
    /// means.
    #[new]
    fn new(
        window: usize,
        option: usize,
        bounds: Option<(u64, u64)>,
        steps: u64,
        switched_at: Option<u64>,
        changes: Vec<f64>,
    ) -> PyResult<Self> {
        let mean = match option {
            1 => ChangeMean::Arithmetic,
            2 => ChangeMean::Geometric,
            other => return Err(PyValueError::new_err(format!("option must be 1 or 2, and is {other}"))),
        };
        let switch = PhaseSwitch::new(mean, window, bounds.map(|(earliest, latest)| [earliest, latest]));
        let switch = switch.map_err(|e| PyValueError::new_err(format!("clipping: {e}")))?;
        Ok(StepSwitch(switch.resumed(steps, switched_at, changes)))
    }

    /// Counts a step.
    fn advance(&mut self) {
        self.0.advance();
    }

    /// Takes note of the sum of this step's changes over so many elements; whether training switches now.
    fn observe(&mut self, sum: f64, elements: usize, threshold: f64) -> bool {
        self.0.observe(sum, elements, threshold)
    }

    /// Steps so far.
    fn steps(&self) -> u64 {
        self.0.steps()
    }

    /// The step after which training switched, or `None`.
    fn switched_at(&self) -> Option<u64> {
        self.0.switched_at()
    }

    /// The means of the last steps, oldest first.
    fn changes(&self) -> Vec<f64> {
        self.0.changes().collect()
    }
}
