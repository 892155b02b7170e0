//! A contender's process.

use std::{
    env, fs,
    io::{self, BufRead, BufReader, Write},
    process::{Child, ChildStdin, Command, Stdio},
    sync::mpsc::{self, Receiver, RecvTimeoutError},
    thread,
    time::Duration,
};

use anyhow::{Context, Result, bail};
use serde::de::DeserializeOwned;
use twofour_cli::{interrupt, threads};

use super::{
    contender::{ModelSource, Weights},
    generation::{Introduction, Task, Times},
};

/// A contender that has introduced itself. Its process ends when this is dropped.
#[derive(Debug)]
pub(crate) struct ContenderProcess {
    pub(crate) introduction: Introduction,
    child: Child,
    stdin: ChildStdin,
    lines: Receiver<String>,
    command: String,
}

impl Drop for ContenderProcess {
    fn drop(&mut self) {
        // Either fails only where the process is gone already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The command that starts this program as a contender.
///
/// # Errors
/// Where this program's own file is not found.
pub(crate) fn own_contender(source: &ModelSource, weights: Weights, threads: usize) -> Result<Command> {
    let mut command = Command::new(env::current_exe().context("finding this program, to start it anew for measuring")?);
    command.args(["generate-worker", "--model", &source.model, "--weights", &weights.name()]);
    if let Some(layers) = source.layers {
        command.args(["--layers", &layers.to_string()]);
    }
    if let Some(vocabulary) = source.vocabulary {
        command.args(["--vocabulary", &vocabulary.to_string()]);
    }
    command.env("RAYON_NUM_THREADS", threads.to_string());
    Ok(command)
}

impl ContenderProcess {
    /// Starts a contender and waits until its model is loaded; `name` is for errors.
    ///
    /// # Errors
    /// A program that cannot be started, ends, or says something else; [`interrupt::Interrupted`].
    pub(crate) fn start(mut command: Command, name: &str) -> Result<Self> {
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| format!("starting the program `{name}`"))?;
        let (Some(stdin), Some(stdout)) = (child.stdin.take(), child.stdout.take()) else {
            bail!("the program `{name}` has no pipes");
        };
        let (send, lines) = mpsc::channel();
        // Ends when the process does, or when the receiver is dropped.
        let read = move || BufReader::new(stdout).lines().map_while(io::Result::ok).try_for_each(|l| send.send(l));
        thread::Builder::new().spawn(read).map_err(threads::refused)?;
        let introduction = Introduction { contender: name.to_owned(), version: None, weight_bytes: 0 };
        let mut process = ContenderProcess { introduction, child, stdin, lines, command: name.to_owned() };
        process.introduction = process.answer()?;
        Ok(process)
    }

    /// Has the contender do a task.
    ///
    /// # Errors
    /// Those of [`ContenderProcess::start`].
    pub(crate) fn run(&mut self, task: Task) -> Result<Times> {
        writeln!(self.stdin, "{}", serde_json::to_string(&task)?)
            .and_then(|()| self.stdin.flush())
            .with_context(|| format!("asking the program `{}`", self.command))?;
        let times: Times = self.answer()?;
        if times.prefill_s > 0.0 && times.decode_s >= 0.0 && times.decode_s.is_finite() {
            return Ok(times);
        }
        bail!("the program `{}` answered impossible times: {times:?}", self.command)
    }

    /// The most memory that the process has had at a time, in bytes; nothing where the operating system does not tell.
    pub(crate) fn peak_memory(&self) -> Option<u64> {
        let status = fs::read_to_string(format!("/proc/{}/status", self.child.id())).ok()?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
        line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
    }

    fn answer<A: DeserializeOwned>(&mut self) -> Result<A> {
        loop {
            interrupt::check()?;
            match self.lines.recv_timeout(Duration::from_millis(100)) {
                // Programs print other things, too.
                Ok(line) if !line.trim_start().starts_with('{') => tracing::info!(%line, "the program says"),
                Ok(line) => {
                    return serde_json::from_str(&line)
                        .with_context(|| format!("the program `{}` answered what is no answer: {line}", self.command));
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => {
                    let status = self.child.wait().context("waiting for the program")?;
                    // A Ctrl-C reaches both processes.
                    interrupt::check()?;
                    bail!(
                        "the program `{}` ended early ({status}); a process that takes too much memory ends like \
                         that",
                        self.command
                    );
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Result<ContenderProcess> {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        ContenderProcess::start(command, "a script")
    }

    const HELLO: &str = r#"echo loading; echo '{"contender": "other", "version": "1", "weight_bytes": 12}'"#;

    #[test]
    fn a_program_of_another_kind_takes_part() {
        let answers = r#"while read task; do echo "$task" >&2; echo '{"prefill_s": 0.5, "decode_s": 0.25}'; done"#;
        let mut process = shell(&format!("{HELLO}; {answers}")).unwrap();
        assert_eq!((process.introduction.contender.as_str(), process.introduction.weight_bytes), ("other", 12));
        for _ in 0..2 {
            let times = process.run(Task { prompt: 3, length: 2 }).unwrap();
            assert_eq!(times, Times { prefill_s: 0.5, decode_s: 0.25 });
        }
        if cfg!(target_os = "linux") {
            assert!(process.peak_memory().is_some_and(|bytes| bytes > 100_000));
        }
    }

    #[test]
    fn a_program_that_answers_nothing_is_an_error_that_names_it() {
        for script in ["exit 3", "echo '{}'"] {
            let error = shell(script).unwrap_err();
            assert!(error.to_string().contains("a script"), "{error}");
        }
        let mut process = shell(&format!("{HELLO}; read task; echo '{{\"prefill_s\": 0, \"decode_s\": 1}}'")).unwrap();
        let error = process.run(Task { prompt: 1, length: 1 }).unwrap_err();
        assert!(error.to_string().contains("impossible"), "{error}");
    }
}
