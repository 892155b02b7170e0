//! The threads that the command computes with.

use std::{
    env,
    fmt::Display,
    io,
    num::NonZero,
    sync::{
        Arc, Mutex, PoisonError,
        mpsc::{self, Sender},
    },
    thread::{self, Builder},
};

use anyhow::{Context, Result, anyhow};

use crate::{
    exit::Usage,
    present::{Screen, units},
};

/// The environment variable that holds their number.
const VARIABLE: &str = "RAYON_NUM_THREADS";

/// Stack of a thread that computes, whatever the environment says.
const STACK: usize = 2 << 20;

/// Returns the number of threads that run at the same time here: of the processors that this process may use, and those
/// of its container.
pub fn of_machine() -> usize {
    thread::available_parallelism().map_or(1, NonZero::get)
}

/// Returns the number of threads that an option asks for, at least 1 and at most those of the machine.
///
/// # Errors
/// What is wrong with it.
pub fn option(text: &str) -> Result<usize, String> {
    let machine = of_machine();
    match text.parse() {
        Ok(0) => Err("at least 1 thread computes".to_owned()),
        Ok(threads) if threads > machine => {
            let has = units::plural(machine, "hardware thread");
            Err(format!("this machine has {has}; with more, they would wait for each other"))
        }
        Ok(threads) => Ok(threads),
        Err(_) => Err("not a number of threads".to_owned()),
    }
}

/// Starts the threads: as many as the environment asks for, but no more than the machine runs at the same time and the
/// system starts.
///
/// # Errors
/// [`Usage`] for a number that is none; that no thread can be started.
pub fn start(screen: &Screen) -> Result<()> {
    let machine = of_machine();
    let wanted = match env::var_os(VARIABLE) {
        Some(text) => asked_for(&text.to_string_lossy())?.unwrap_or(machine),
        None => machine,
    };
    if wanted > machine {
        screen.warn(format_args!(
            "{VARIABLE} asks for {}; this machine runs {machine} at the same time, and so many compute",
            units::plural(wanted, "thread")
        ));
    }
    let wanted = wanted.min(machine);
    let waiting = Waiting::start(wanted)?;
    if waiting.count < wanted {
        let started = waiting.count;
        screen.warn(format_args!("the system starts {started} of {wanted} threads; the command computes with these"));
    }
    let pool = rayon::ThreadPoolBuilder::new().num_threads(waiting.count);
    pool.spawn_handler(|part| waiting.run(part)).build_global().context("starting the threads that compute")
}

/// The error where the system refuses a thread.
pub fn refused(error: impl Display) -> anyhow::Error {
    anyhow!(
        "the system starts no other thread or process ({error}); raise the limit of processes (`ulimit -u`, or the \
         container's), or of memory"
    )
}

/// The number in the variable's text; none for 0 and for nothing, which ask for all.
fn asked_for(text: &str) -> Result<Option<usize>, Usage> {
    match text.trim() {
        "" => Ok(None),
        number => match number.parse::<usize>() {
            Ok(number) => Ok((number > 0).then_some(number)),
            Err(_) => Err(Usage(format!(
                "{VARIABLE} is {text:?}; it must be a number of threads, or 0 for all of the machine"
            ))),
        },
    }
}

/// Threads that have started and wait for the work of a pool: a pool whose threads do not all start can't be made a
/// second time.
struct Waiting {
    count: usize,
    work: Sender<rayon::ThreadBuilder>,
}

impl Waiting {
    /// Starts as many as the system does, at most `wanted`.
    ///
    /// # Errors
    /// The system's where there would be none.
    fn start(wanted: usize) -> Result<Self> {
        let (work, receiver) = mpsc::channel();
        let receiver = Arc::new(Mutex::new(receiver));
        for count in 0..wanted {
            let receiver = receiver.clone();
            let wait = move || {
                let part = receiver.lock().unwrap_or_else(PoisonError::into_inner).recv();
                // None comes where the pool is not made.
                if let Ok(part) = part {
                    rayon::ThreadBuilder::run(part);
                }
            };
            match Builder::new().stack_size(STACK).spawn(wait) {
                Ok(_) => {}
                Err(error) if count == 0 => return Err(refused(error)),
                Err(_) => return Ok(Waiting { count, work }),
            }
        }
        Ok(Waiting { count: wanted, work })
    }

    /// Has one of them do a part of a pool's work.
    fn run(&self, part: rayon::ThreadBuilder) -> io::Result<()> {
        self.work.send(part).map_err(|_| io::ErrorKind::BrokenPipe.into())
    }
}

/// Stack of the thread that a command begins on: what systems give by default.
const MAIN_STACK: usize = 8 << 20;

/// Runs the command: on this thread, or on one with a stack of its own where the limit of this one's is below what is
/// usual.
///
/// # Errors
/// The system's where it starts no thread.
pub fn with_stack<R: Send>(command: impl FnOnce() -> R + Send) -> Result<R> {
    if !is_stack_small() {
        return Ok(command());
    }
    thread::scope(|scope| {
        let thread = Builder::new().stack_size(MAIN_STACK).spawn_scoped(scope, command).map_err(refused)?;
        thread.join().or_else(|panic| std::panic::resume_unwind(panic))
    })
}

#[cfg(unix)]
fn is_stack_small() -> bool {
    use rustix::process::{Resource, getrlimit};
    getrlimit(Resource::Stack).current.is_some_and(|bytes| bytes < MAIN_STACK as u64)
}

#[cfg(not(unix))]
fn is_stack_small() -> bool {
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_of_threads_is_one_or_all() {
        assert_eq!(asked_for("3").unwrap(), Some(3));
        assert_eq!((asked_for("0").unwrap(), asked_for(" ").unwrap()), (None, None));
        for text in ["-1", "abc", "1.5", "99999999999999999999"] {
            let error = asked_for(text).unwrap_err().to_string();
            assert!(error.contains(VARIABLE) && error.contains(text), "{error}");
        }
    }

    #[test]
    fn a_pool_runs_on_threads_that_have_started() {
        let waiting = Waiting::start(3).unwrap();
        assert_eq!(waiting.count, 3);
        let pool = rayon::ThreadPoolBuilder::new().num_threads(3).spawn_handler(|part| waiting.run(part));
        assert_eq!(pool.build().unwrap().broadcast(|_| ()).len(), 3);
    }
}
