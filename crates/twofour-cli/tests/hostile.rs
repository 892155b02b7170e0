//! Limits of memory, threads and stacks, links in the place of outputs, and names that steer a terminal.
#![cfg(unix)]

use std::{
    fs,
    os::unix::{ffi::OsStrExt, fs::symlink},
    path::Path,
    process::Command,
    time::{Duration, Instant},
};

use crate::support::{
    Ran, copy, fixture, model, names, random, run,
    training::{tiny_quickstart, tiny_recipe},
    twofour, write,
};

/// Runs the command under limits of the shell's `ulimit`, with an environment.
fn limited(directory: &Path, limits: &str, environment: &[(&str, &str)], arguments: &[&str]) -> Ran {
    let mut shell = Command::new("sh");
    shell.arg("-c").arg(format!("ulimit {limits} && exec \"$0\" \"$@\"")).arg(env!("CARGO_BIN_EXE_twofour"));
    let mut child = shell
        .args(arguments)
        // Each thread takes memory: the limits hold on a machine with any number of them.
        .env("RAYON_NUM_THREADS", "2")
        .envs(environment.iter().copied())
        .current_dir(directory)
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let begun = Instant::now();
    while child.try_wait().unwrap().is_none() {
        if begun.elapsed() > Duration::from_secs(60) {
            child.kill().unwrap();
            panic!("{arguments:?} does not end under {limits}");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    child.wait_with_output().unwrap().into()
}

/// Writes a tensor of zeros and a small matrix of them, as a hole of the file.
fn zeros(path: &Path, shape: &[usize]) {
    let bytes = 4 * shape.iter().product::<usize>();
    let end = bytes + 4 * 64;
    let large = format!(r#""a.weight":{{"dtype":"F32","shape":{shape:?},"data_offsets":[0,{bytes}]}}"#);
    let small = format!(r#""b.weight":{{"dtype":"F32","shape":[8,8],"data_offsets":[{bytes},{end}]}}"#);
    let header = format!("{{{large},{small}}}");
    let start = [&(header.len() as u64).to_le_bytes(), header.as_bytes()].concat();
    fs::write(path, &start).unwrap();
    fs::OpenOptions::new().write(true).open(path).unwrap().set_len((start.len() + end) as u64).unwrap();
}

/// The least limit of memory in KiB under which the command does something small.
fn least_memory(directory: &Path) -> u64 {
    let starts =
        |kib: u64| limited(directory, &format!("-v {kib}"), &[], &["inspect", "small.safetensors"]).code == Some(0);
    (20..200).map(|tens| tens * 10_000).find(|kib| starts(*kib)).unwrap()
}

#[test]
fn without_memory_every_command_ends_with_one_line_and_leaves_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let at = directory.path();
    write(&at.join("small.safetensors"), &[("a.weight", random(&[8, 8]))]);
    zeros(&at.join("big.safetensors"), &[4096, 2048]);
    run(at, &["prune", "big.safetensors", "-o", "sparse.safetensors"]).good();
    run(at, &["compress", "sparse.safetensors", "-o", "packed.safetensors"]).good();
    let least = least_memory(at);
    let before = names(at);
    let mut refused = 0;
    for arguments in [
        &["prune", "big.safetensors", "-o", "out.safetensors"][..],
        &["prune", "big.safetensors", "-o", "out.safetensors", "--transposable", "greedy"],
        &["compress", "sparse.safetensors", "-o", "out.safetensors"],
        &["quantize", "packed.safetensors", "-o", "out.safetensors", "--dtype", "int8"],
        &["decompress", "packed.safetensors", "-o", "out.safetensors"],
        &["check", "sparse.safetensors"],
    ] {
        for more in [0, 20_000, 60_000] {
            let ran = limited(at, &format!("-v {}", least + more), &[("RUST_BACKTRACE", "1")], arguments);
            if ran.code != Some(0) {
                let (lines, message) = (ran.stderr.lines().count(), ran.bad(1));
                assert_eq!(lines, 1, "{arguments:?}: {message}");
                assert!(message.contains("memory"), "{arguments:?}: {message}");
                refused += 1;
            }
            let _ = fs::remove_file(at.join("out.safetensors"));
            assert_eq!(names(at), before, "{arguments:?}");
        }
    }
    assert!(refused > 0, "no limit was too small");
}

/// Every command that computes, with a model or a text of this folder; an output is named `out`.
fn commands(at: &Path) -> Vec<Vec<&'static str>> {
    copy(fixture("llama"), at.join("llama"));
    tiny_recipe(at);
    tiny_quickstart(&at.join("quick"), 1.0, 4);
    run(at, &["prune", "llama", "-o", "pruned"]).good();
    run(at, &["compress", "pruned", "-o", "packed"]).good();
    run(at, &["quantize", "packed", "-o", "integers", "--dtype", "int8"]).good();
    let calibrated = ["--calibration", "text.txt", "--samples", "2", "--length", "32"];
    let prune = |method| [&["prune", "llama", "-o", "out", "--method", method], &calibrated[..]].concat();
    let mut commands = vec![prune("wanda"), prune("ria"), prune("sparsegpt")];
    commands.extend([
        vec!["prune", "llama", "-o", "out", "--transposable", "optimal"],
        vec!["compress", "pruned", "-o", "out"],
        vec!["quantize", "packed", "-o", "out", "--dtype", "int4"],
        vec!["decompress", "integers", "-o", "out"],
        vec!["check", "pruned"],
        vec!["inspect", "packed"],
        vec!["eval", "llama", "--text", "text.txt"],
        vec!["generate", "packed", "--prompt", "two", "--length", "4"],
        vec!["train", "recipe.toml", "-o", "out"],
        vec!["advise", "--shape", "8x8"],
        vec!["quickstart", "--out", "quick"],
    ]);
    commands
}

/// Expects a command to end well, or with one line of error that names what is short, behind at most one of warning.
#[track_caller]
fn expect_clear(ran: Ran, arguments: &[&str]) {
    if ran.code == Some(0) {
        return;
    }
    let lines: Vec<&str> = ran.stderr.lines().filter(|line| !line.starts_with("warning: the system starts")).collect();
    // `advise` measures in a process of its own, which says what it lacked.
    let most = if arguments[0] == "advise" { 2 } else { 1 };
    assert!(ran.code == Some(1) && (1..=most).contains(&lines.len()), "{arguments:?}: {ran:?}");
    let is_clear = |line: &&str| line.starts_with("error: ") && line.contains("memory");
    assert!(lines.iter().all(is_clear), "{arguments:?}: {ran:?}");
}

#[test]
fn under_any_limit_of_memory_a_command_ends_with_a_line_that_names_it() {
    let directory = tempfile::tempdir().unwrap();
    let at = directory.path();
    write(&at.join("small.safetensors"), &[("a.weight", random(&[8, 8]))]);
    let commands = commands(at);
    let least = least_memory(at);
    let before = names(at);
    for arguments in &commands {
        for kib in [least - 2_000, least + 4_000] {
            // One that the system's loader does not even start is not ours.
            let begins = limited(at, &format!("-v {kib}"), &[], &["inspect", "small.safetensors"]).code;
            if !matches!(begins, Some(0 | 1)) {
                continue;
            }
            let ran = limited(at, &format!("-v {kib}"), &[("RUST_BACKTRACE", "1")], arguments);
            let leaves_run = matches!(arguments[0], "train" | "quickstart");
            if ran.code != Some(0) && !leaves_run {
                assert_eq!(names(at), before, "{arguments:?} under {kib}");
            }
            expect_clear(ran, arguments);
            let _ = fs::remove_dir_all(at.join("out"));
        }
    }
}

#[test]
fn beyond_a_limit_of_files_an_output_is_an_error_and_leaves_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let at = directory.path();
    let commands = commands(at);
    let before = names(at);
    for arguments in commands.iter().filter(|arguments| arguments.contains(&"out")) {
        // Blocks of 512 bytes or of 1 KiB.
        let ran = limited(at, "-f 8", &[], arguments);
        assert!(ran.code == Some(1) && ran.stderr.starts_with("error: "), "{arguments:?}: {ran:?}");
        assert!(ran.stderr.contains("File too large"), "{arguments:?}: {ran:?}");
        if arguments[0] == "train" {
            // With room, the same command trains to the end.
            assert_eq!(run(at, arguments).code, Some(0));
            fs::remove_dir_all(at.join("out")).unwrap();
        }
        assert_eq!(names(at), before, "{arguments:?}");
    }
}

/// Root is not bound by the limit of processes, so that root becomes somebody else.
#[test]
#[cfg(target_os = "linux")]
fn without_threads_every_command_ends_with_a_line_that_names_them() {
    use std::os::unix::fs::{MetadataExt, PermissionsExt};
    let directory = tempfile::tempdir().unwrap();
    let at = directory.path();
    let commands = commands(at);
    for writable in [at, &at.join("quick")] {
        fs::set_permissions(writable, fs::Permissions::from_mode(0o777)).unwrap();
    }
    let is_root = fs::metadata("/proc/self").unwrap().uid() == 0;
    let somebody: &[&str] = if is_root { &["setpriv", "--reuid=64321", "--clear-groups"] } else { &["env"] };
    let under = |limit: &[&str], arguments: &[&str]| -> std::io::Result<Ran> {
        let all = [somebody, limit, &[env!("CARGO_BIN_EXE_twofour")], arguments].concat();
        let mut command = Command::new(all[0]);
        Ok(command.args(&all[1..]).current_dir(at).env("RUST_BACKTRACE", "1").output()?.into())
    };
    for limit in [&[][..], &["prlimit", "--nproc=1000:"]] {
        match under(limit, &["inspect", "packed"]) {
            Ok(ran) if ran.code == Some(0) => {}
            other => {
                return eprintln!("skipped: the command does not run as another user with a limit here: {other:?}");
            }
        }
    }
    for arguments in &commands {
        for processes in [1, 2] {
            let ran = under(&["prlimit", &format!("--nproc={processes}:")], arguments).unwrap();
            assert!(processes > 1 || ran.code == Some(1), "{arguments:?}: {ran:?}");
            expect_clear(ran, arguments);
            let _ = fs::remove_dir_all(at.join("out"));
        }
    }
}

#[test]
fn pruning_holds_pieces_and_no_tensor() {
    let directory = tempfile::tempdir().unwrap();
    let at = directory.path();
    write(&at.join("small.safetensors"), &[("a.weight", random(&[8, 8]))]);
    let limits = format!("-v {}", least_memory(at) + 40_000);
    // A matrix, which is pruned, and a tensor that is copied.
    for shape in [&[4096, 4096][..], &[4, 1024, 4096]] {
        zeros(&at.join("big.safetensors"), shape);
        limited(at, &limits, &[], &["prune", "big.safetensors", "-o", "out.safetensors", "--force", "--quiet"]).good();
        assert_eq!(fs::read(at.join("out.safetensors")).unwrap().len() >> 20, 64);
    }
}

#[test]
fn threads_are_bounded_by_the_machine_and_a_wrong_number_is_refused() {
    let (directory, _) = model();
    let at = directory.path();
    let prune = |threads: &str, output: &str| -> Ran {
        let mut command = twofour();
        command.args(["prune", "model.safetensors", "-o", output]).env("RAYON_NUM_THREADS", threads);
        command.current_dir(at).output().unwrap().into()
    };
    for (i, threads) in ["1", "0", ""].iter().enumerate() {
        prune(threads, &format!("{i}.safetensors")).good();
    }
    let begun = Instant::now();
    let ran = prune("5000", "many.safetensors");
    assert_eq!(ran.code, Some(0), "{ran:?}");
    assert!(ran.stderr.starts_with("warning: RAYON_NUM_THREADS asks for 5 000 threads"), "{ran:?}");
    assert!(begun.elapsed() < Duration::from_secs(20));
    assert_eq!(fs::read(at.join("many.safetensors")).unwrap(), fs::read(at.join("0.safetensors")).unwrap());
    for threads in ["-1", "abc", "1.5", "18446744073709551616"] {
        let message = prune(threads, "wrong.safetensors").bad(2);
        assert!(message.contains("RAYON_NUM_THREADS") && message.contains(threads), "{message}");
    }
    for threads in ["0", "5000", "abc"] {
        run(at, &["advise", "--shape", "64x64", "--threads", threads]).bad(2);
    }
    assert!(!at.join("wrong.safetensors").exists());
}

#[test]
fn a_small_stack_is_enough() {
    let (directory, _) = model();
    for limits in ["-s 256", "-s 64"] {
        let arguments = ["prune", "model.safetensors", "-o", "out.safetensors", "--force"];
        limited(directory.path(), limits, &[("RUST_MIN_STACK", "1000")], &arguments).good();
    }
}

#[test]
fn a_link_or_device_in_the_outputs_place_is_refused_and_stays() {
    let (directory, _) = model();
    let at = directory.path();
    fs::write(at.join("other"), "of somebody else").unwrap();
    fs::create_dir(at.join("folder")).unwrap();
    let status = Command::new("mkfifo").arg(at.join("fifo")).status().unwrap();
    assert!(status.success());
    for (i, target) in ["other", "nothing", "fifo", "/dev/null", "/dev/stdout", "/proc/self/fd/1"].iter().enumerate() {
        let link = format!("link{i}.safetensors");
        symlink(target, at.join(&link)).unwrap();
        for force in [&[][..], &["--force"]] {
            let message = run(at, &[&["prune", "model.safetensors", "-o", &link], force].concat()).bad(1);
            assert!(message.contains(&link), "{message}");
        }
        assert_eq!(fs::read_link(at.join(&link)).unwrap(), Path::new(target));
    }
    assert_eq!(fs::read_to_string(at.join("other")).unwrap(), "of somebody else");
    assert!(!at.join("nothing").exists());
    // A directory through a link is that directory, and what it holds are files.
    fs::create_dir(at.join("in")).unwrap();
    fs::copy(at.join("model.safetensors"), at.join("in/model.safetensors")).unwrap();
    fs::write(at.join("in/config.json"), "{}").unwrap();
    symlink("folder", at.join("through")).unwrap();
    run(at, &["prune", "in", "-o", "through"]).good();
    assert!(at.join("folder/model.safetensors").is_file());
    for held in ["model.safetensors", "config.json"] {
        fs::remove_file(at.join("folder").join(held)).unwrap();
        symlink("../other", at.join("folder").join(held)).unwrap();
        let message = run(at, &["prune", "in", "-o", "through", "--force"]).bad(1);
        assert!(message.contains(held) && message.contains("symbolic link"), "{message}");
        fs::remove_file(at.join("folder").join(held)).unwrap();
        run(at, &["prune", "in", "-o", "through", "--force"]).good();
    }
    assert_eq!(fs::read_to_string(at.join("other")).unwrap(), "of somebody else");
}

/// Runs the command in a folder where a link has the name of one of its files, and expects a refusal that names it, and
/// what the link leads to untouched.
#[track_caller]
fn expect_link_refused(at: &Path, link: &str, arguments: &[&str]) {
    let path = at.join(link);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    for target in [at.join("precious"), at.join("nothing")] {
        let _ = fs::rename(&path, at.join("before"));
        symlink(&target, &path).unwrap();
        let message = limited(at, "-c 0", &[], arguments).bad(1);
        assert!(message.contains(link) && message.contains("symbolic link"), "{arguments:?}: {message}");
        assert!(!message.contains("--force replaces"), "{message}");
        assert_eq!(fs::read_link(&path).unwrap(), target);
        fs::remove_file(&path).unwrap();
        let _ = fs::rename(at.join("before"), &path);
    }
    assert_eq!(fs::read_to_string(at.join("precious")).unwrap(), "of somebody else");
    assert!(!at.join("nothing").exists());
}

#[test]
fn links_in_the_place_of_a_commands_own_files_are_refused_and_stay() {
    let (directory, _) = model();
    let at = directory.path();
    fs::write(at.join("precious"), "of somebody else").unwrap();
    expect_link_refused(at, "pages/twofour.1", &["man", "pages"]);
    for force in [&[][..], &["--force"]] {
        let out = ["prune", "model.safetensors", "-o", "out.safetensors"];
        expect_link_refused(at, "out.safetensors", &[&out[..], force].concat());
    }
    fs::create_dir(at.join("in")).unwrap();
    fs::copy(at.join("model.safetensors"), at.join("in/model.safetensors")).unwrap();
    expect_link_refused(at, "out/.twofour.lock", &["prune", "in", "-o", "out"]);
    expect_link_refused(at, "quick/.twofour.lock", &["quickstart", "--out", "quick"]);
    for file in ["plan.json", "report.json", "text"] {
        expect_link_refused(at, &format!("quick/{file}"), &["quickstart", "--out", "quick", "--force"]);
    }
    tiny_recipe(at);
    let train = ["train", "recipe.toml", "-o", "run"];
    expect_link_refused(at, "run/lock", &train);
    run(at, &train).good();
    for file in ["recipe.toml", "metrics.jsonl", "report.json", "report.svg", "model"] {
        expect_link_refused(at, &format!("run/{file}"), &train);
    }
    run(at, &train).good();
}

/// Text that clears the screen, sets a title and turns what follows around.
const HOSTILE: &str = "a\x1b[2J\x1b]0;title\x07\u{9b}1m\u{202e}\r\nb.weight";

#[test]
fn names_from_a_file_do_not_steer_the_terminal() {
    let directory = tempfile::tempdir().unwrap();
    let at = directory.path();
    let file = "m\x1b[31m\u{9b}.safetensors";
    write(&at.join(file), &[(HOSTILE, random(&[8, 8])), ("short.weight", random(&[8, 6]))]);
    let shown = |ran: Ran| {
        let text = format!("{}{}", ran.stdout, ran.stderr);
        assert!(!text.contains("\nb.weight"), "{text:?}");
        for hidden in ["\x1b[2J", "\x1b[31m\u{9b}", "\x1b]", "\x07", "\u{9b}", "\u{202e}", "\r"] {
            assert!(!text.contains(hidden), "{hidden:?} in {text:?}");
        }
        ran
    };
    for options in [&["--color", "always"][..], &["--color", "always", "-v"], &["--json"]] {
        for arguments in [
            &["inspect", file][..],
            &["check", file],
            &["prune", file, "-o", "out.safetensors", "--force", "--include", "*"],
            &["compress", file, "-o", "small.safetensors", "--force", "--prune"],
            &["compress", file, "-o", "small.safetensors", "--force"],
            &["inspect", "missing\x1b[2J\u{202e}"],
        ] {
            shown(run(at, &[arguments, options].concat()));
        }
    }
    let answer = shown(run(at, &["inspect", file, "--json"]).good()).json();
    assert!(answer["tensors"].as_array().unwrap().iter().any(|tensor| tensor["name"] == HOSTILE), "{answer}");
    let table = shown(run(at, &["inspect", file]).good());
    assert!(table.stdout.contains("a\\u{1b}[2J"), "{table:?}");
}

#[test]
fn an_answer_with_a_path_that_is_not_utf8_is_json() {
    let (directory, model) = model();
    let at = directory.path();
    let named = |name: &[u8]| at.join(std::ffi::OsStr::from_bytes(name));
    let (pruned, packed) = (named(b"pruned\xff.safetensors"), named(b"packed\xff.safetensors"));
    let convert = |command: &[&str], input: &Path, output: &Path| {
        let ran: Ran = twofour().args(command).arg("--json").arg(input).arg("-o").arg(output).output().unwrap().into();
        assert!(ran.good().json()["output"].as_str().unwrap().ends_with("\u{fffd}.safetensors"));
    };
    convert(&["prune"], &model, &pruned);
    convert(&["compress"], &pruned, &packed);
    convert(&["quantize", "--dtype", "int8"], &packed, &named(b"int8\xff.safetensors"));
    convert(&["decompress"], &packed, &named(b"dense\xff.safetensors"));
    for command in ["inspect", "check"] {
        let ran: Ran = twofour().args([command, "--json"]).arg(&pruned).output().unwrap().into();
        assert!(ran.stderr.is_empty() && ran.json().is_object(), "{ran:?}");
    }
}
