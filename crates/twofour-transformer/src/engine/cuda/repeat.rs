//! Steps that were captured in CUDA graphs.

use std::{collections::HashMap, fmt::Display};

use twofour_cuda::layer::{CapturedWork, LayerContext};

use crate::{Error, Result};

/// Kinds of steps that are remembered; a run has two or three.
const MOST: usize = 16;

/// Failed captures after which a kind of step is launched call by call. Calls of other threads, such as the loading of
/// kernels, can spoil one.
const MAX_FAILURES: u32 = 3;

/// What is known of a kind of step.
#[derive(Debug)]
enum Kind {
    /// It has run: plans, kernels and memory are there. So many captures of it have failed.
    Ran { failures: u32 },
    /// It is replayed.
    Captured(CapturedWork),
    /// It cannot be captured.
    Refused,
}

/// Steps by key, and what was said about them.
#[derive(Debug, Default)]
pub(super) struct Repeats {
    kinds: HashMap<u64, Kind>,
    note: Option<String>,
    is_off: bool,
    replays: u64,
}

/// What is to be done with a step.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// Its calls are launched.
    Launch,
    /// Its calls are captured, and the graph is launched.
    Capture,
    /// Its graph has been launched.
    Replayed,
}

impl Repeats {
    /// Turns captures on or off; off, every step is launched call by call.
    pub(super) fn turn(&mut self, on: bool) {
        (self.is_off, self.kinds) = (!on, HashMap::new());
    }

    /// Replays the step of a key where it has been captured, or says what is to be done.
    pub(super) fn next(&mut self, key: u64) -> Result<Next> {
        if self.is_off {
            return Ok(Next::Launch);
        }
        if self.kinds.len() >= MOST && !self.kinds.contains_key(&key) {
            self.kinds.clear();
        }
        match self.kinds.get_mut(&key) {
            None => {
                self.kinds.insert(key, Kind::Ran { failures: 0 });
                Ok(Next::Launch)
            }
            Some(Kind::Refused) => Ok(Next::Launch),
            Some(Kind::Ran { .. }) => Ok(Next::Capture),
            Some(Kind::Captured(work)) => match work.replay()? {
                true => {
                    self.replays += 1;
                    Ok(Next::Replayed)
                }
                // Memory was freed since. The step runs once with the memory that there is now.
                false => {
                    self.kinds.insert(key, Kind::Ran { failures: 0 });
                    Ok(Next::Launch)
                }
            },
        }
    }

    /// Captures a step and launches its graph. Returns whether it did; otherwise nothing ran, and the step is to be
    /// launched.
    pub(super) fn capture<X: From<Error> + Display>(
        &mut self,
        context: &LayerContext,
        key: u64,
        work: &mut impl FnMut() -> Result<(), X>,
    ) -> Result<bool> {
        match CapturedWork::capture(context, || work().map_err(Failed)) {
            Ok(mut captured) => {
                let launched = captured.replay()?;
                self.kinds.insert(key, if launched { Kind::Captured(captured) } else { Kind::Refused });
                Ok(launched)
            }
            Err(Failed(error)) => {
                let failures = match self.kinds.get(&key) {
                    Some(Kind::Ran { failures }) => failures + 1,
                    _ => MAX_FAILURES,
                };
                if failures < MAX_FAILURES {
                    self.kinds.insert(key, Kind::Ran { failures });
                } else {
                    self.kinds.insert(key, Kind::Refused);
                    let what = "steps are launched call by call, because a CUDA graph cannot capture them";
                    self.note = Some(format!("{what}: {error}"));
                }
                // What the failed capture left behind in the driver's state is told above.
                context.device().context().check_err().ok();
                Ok(false)
            }
        }
    }

    pub(super) fn replays(&self) -> u64 {
        self.replays
    }

    /// What was said since the last call.
    pub(super) fn take_note(&mut self) -> Option<String> {
        self.note.take()
    }
}

/// An error of a captured step.
struct Failed<X>(X);

impl<X: From<Error>> From<twofour_cuda::Error> for Failed<X> {
    fn from(error: twofour_cuda::Error) -> Self {
        Failed(Error::from(error).into())
    }
}
