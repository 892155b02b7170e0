//! The device time of the phases of a long piece of work.

use std::fmt;

use cudarc::driver::{CudaEvent, DriverError, sys::CUevent_flags};

use crate::{Error, Result, layer::LayerContext};

/// Marks on a stream, each where a phase begins. The last one only ends the phase before it.
pub struct PhaseMarks {
    context: LayerContext,
    marks: Vec<(&'static str, CudaEvent)>,
}

impl fmt::Debug for PhaseMarks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PhaseMarks").field("context", &self.context).field("marks", &self.marks.len()).finish()
    }
}

fn failed(error: DriverError) -> Error {
    Error::driver("timing phases", error)
}

impl PhaseMarks {
    /// Returns no marks on the context's stream.
    pub fn new(context: &LayerContext) -> Self {
        Self { context: context.clone(), marks: vec![] }
    }

    /// Launches a mark where the phase of that name begins, and the one before it ends.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn begin(&mut self, phase: &'static str) -> Result<()> {
        let flags = Some(CUevent_flags::CU_EVENT_DEFAULT);
        let event = self.context.device().context().new_event(flags).map_err(failed)?;
        event.record(self.context.stream()).map_err(failed)?;
        self.marks.push((phase, event));
        Ok(())
    }

    /// Returns the milliseconds of each phase, by name in the order of their first marks, and forgets the marks. Phases
    /// of one name are added. Synchronizes the stream.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn take(&mut self) -> Result<Vec<(&'static str, f64)>> {
        self.context.synchronize()?;
        let mut phases: Vec<(&'static str, f64)> = vec![];
        let marks = std::mem::take(&mut self.marks);
        for ((name, begun), (_, ended)) in marks.iter().zip(marks.iter().skip(1)) {
            let ms = f64::from(begun.elapsed_ms(ended).map_err(failed)?);
            match phases.iter_mut().find(|(known, _)| known == name) {
                Some((_, sum)) => *sum += ms,
                None => phases.push((name, ms)),
            }
        }
        Ok(phases)
    }
}
