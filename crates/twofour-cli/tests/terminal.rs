//! What reaches a terminal: names and values from files and arguments as one line each, progress within its columns,
//! and nothing stale after Ctrl-C.
#![cfg(unix)]

use std::{fs, path::Path, process::Command};

use crate::support::{Ran, fixture, model, names, random, read_json, run, twofour, write};

/// A name that clears the screen, sets a title, turns text around, and goes on in lines of its own, as if they were
/// this program's.
const HOSTILE: &str = "a\x1b[2J\x1b]0;title\x07\u{9b}1m\u{202e}\u{2028}\r\nerror: b\n  because: c\n\tNext: d";

/// Lines that only a name that is not escaped begins.
const FORGED: [&str; 4] = ["error: b", "  because: c", "\tNext: d", "Next: d"];

/// The run, whose output holds no character that steers a terminal, and no line from a name.
#[track_caller]
fn harmless(ran: Ran) -> Ran {
    for text in [&ran.stdout, &ran.stderr] {
        let steers = |c: char| c.is_control() && c != '\n' || "\u{61c}\u{200e}\u{200f}\u{2028}\u{202e}".contains(c);
        assert!(!text.contains(steers), "{text:?}");
        assert!(!text.lines().any(|line| FORGED.iter().any(|forged| line.starts_with(forged))), "{text}");
    }
    ran
}

/// Copies a checkpoint's directory and changes its configuration.
fn copied(name: &str, to: &Path, change: impl FnOnce(&mut serde_json::Value)) {
    fs::create_dir(to).unwrap();
    for entry in fs::read_dir(fixture(name)).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
    }
    let mut config = read_json(to.join("config.json"));
    change(&mut config);
    fs::write(to.join("config.json"), config.to_string()).unwrap();
}

#[test]
fn names_and_paths_are_escaped_by_every_command() {
    let directory = tempfile::tempdir().unwrap();
    let at = directory.path();
    let named = |end: &str| format!("{HOSTILE}{end}");
    let [file, pruned, small, int8, dense] =
        ["", "-p", "-c", "-i", "-d"].map(|end| named(&format!("{end}.safetensors")));
    let layer = format!("layers.0.{HOSTILE}.weight");
    write(&at.join(&file), &[(&layer, random(&[8, 8])), ("layers.0.b.weight", random(&[8, 6]))]);
    let [decoder, encoder, broken, folder] = ["-llama", "-bert", "-broken", "-man"].map(named);
    copied("llama", &at.join(&decoder), |_| ());
    copied("bert", &at.join(&encoder), |_| ());
    copied("llama", &at.join(&broken), |config| config["hidden_act"] = HOSTILE.into());
    let text = named(".txt");
    fs::write(at.join(&text), "two of four\nthe mask\na weight\nrows are cut\n").unwrap();
    fs::create_dir(at.join(named("-full"))).unwrap();
    fs::write(at.join(named("-full")).join(HOSTILE), "").unwrap();

    let told = format!("{HOSTILE}-metadata.safetensors");
    let header = serde_json::json!({
        "__metadata__": {(HOSTILE): HOSTILE},
        (format!("{HOSTILE}.weight")): {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
    })
    .to_string();
    fs::write(at.join(&told), [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &[0; 4]].concat()).unwrap();

    let good: &[&[&str]] = &[
        &["inspect", &told],
        &["inspect", &file],
        &["inspect", &decoder],
        &["prune", &file, "-o", &pruned],
        &["check", &pruned],
        &["compress", &pruned, "-o", &small],
        &["quantize", &pruned, "-o", &int8, "--dtype", "int8"],
        &["decompress", &small, "-o", &dense],
        &["inspect", &small],
        &[
            "prune",
            &decoder,
            "-o",
            &named("-q"),
            "--method",
            "wanda",
            "--calibration",
            &text,
            "--samples",
            "2",
            "--length",
            "4",
        ],
        &["compress", &named("-q"), "-o", &named("-r")],
        &["eval", &decoder, "--text", &text],
        &["eval", &encoder, "--text", &text, "--against", &encoder],
        &["generate", &decoder, "--length", "3"],
        &["man", &folder],
    ];
    for arguments in good {
        let ran = harmless(run(at, arguments));
        assert!(ran.code == Some(0) && ran.stderr.is_empty(), "{arguments:?}: {ran:?}");
    }
    harmless(run(at, &[&["check"][..], &[&file]].concat()));
    let missing = named("-missing");
    let full = named("-full");
    let bad: &[&[&str]] = &[
        &["inspect", &missing],
        &["check", &missing],
        &["check", &file, "--include", &missing],
        &["advise", &missing],
        &["prune", &missing, "-o", "o"],
        &["sensitivity", &missing, "--calibration", &text],
        &["sensitivity", &file, "--calibration", &missing],
        &["prune", &file, "-o", &pruned],
        &["prune", &file, "-o", &full],
        &["compress", &file, "-o", &named("/x.safetensors")],
        &["compress", &file, "-o", "o.safetensors"],
        &["quantize", &missing, "-o", "o", "--dtype", "int8"],
        &["decompress", &file, "-o", "o.safetensors"],
        &["eval", &missing, "--text", &text],
        &["eval", &decoder, "--text", &missing],
        &["eval", &decoder, "--text", &text, "--against", &missing],
        &["eval", &encoder, "--task", &text],
        &["eval", &broken, "--text", &text],
        &["generate", &broken],
        &["generate", &encoder],
        &["train", &missing, "-o", "o"],
        &["train", &text, "-o", "o"],
        &["quickstart", "-o", &full],
        &["quickstart", "-o", &file],
        &["man", &file],
        &["kernels", "--arch", HOSTILE],
    ];
    for arguments in bad {
        let ran = harmless(run(at, arguments));
        assert!(matches!(ran.code, Some(1 | 2)) && ran.stderr.starts_with("error: "), "{arguments:?}: {ran:?}");
    }
    // clap's errors.
    for command in
        ["inspect", "check", "advise", "prune", "train", "compress", "quantize", "decompress", "eval", "sensitivity"]
            .into_iter()
            .chain(["generate", "shrink", "quickstart", "kernels", "completions", "man"])
    {
        for arguments in [vec![command, &format!("--{HOSTILE}=1")], vec![command, "x", "y", HOSTILE]] {
            let ran = harmless(run(at, &arguments));
            assert!(matches!(ran.code, Some(1 | 2)), "{arguments:?}: {ran:?}");
        }
    }
    assert_eq!(harmless(run(at, &[HOSTILE])).code, Some(2));
    let ran: Ran = twofour().args(["inspect", &missing]).env("RAYON_NUM_THREADS", HOSTILE).output().unwrap().into();
    assert_eq!(harmless(ran).code, Some(2));
}

#[test]
fn values_of_recipes_are_escaped() {
    let directory = tempfile::tempdir().unwrap();
    let at = directory.path();
    let quoted = serde_json::Value::from(HOSTILE).to_string();
    let recipe = format!("{HOSTILE}.toml");
    let text = format!(
        "[model]\nlayers = 1\nwidth = 16\nheads = 2\ncontext = 16\n{quoted} = 1\n[data]\ntext = {quoted}\n\
         [training]\nsteps = 4\n[sparsity]\nmethod = {quoted}\nlayers = [{quoted}]\n"
    );
    fs::write(at.join(&recipe), &text).unwrap();
    let message = harmless(run(at, &["train", &recipe, "-o", "run"])).bad(2);
    assert!(message.lines().count() >= 4 && message.contains("mistakes"), "{message}");
    let set = format!("sparsity.method={HOSTILE}");
    harmless(run(at, &["train", &recipe, "-o", "run", "--set", &set])).bad(2);
    harmless(run(at, &["train", &recipe, "-o", "run", "--set", HOSTILE])).bad(2);

    // A folder of another run, whose differing values are told.
    let data = format!("{HOSTILE}.txt");
    fs::write(at.join(&data), "two of four\n".repeat(60)).unwrap();
    let name = serde_json::Value::from(data.as_str());
    let text = format!(
        "[model]\nlayers = 1\nwidth = 16\nheads = 2\ncontext = 16\n[data]\ntext = {name}\n[training]\nsteps = 4\n\
         batch = 2\nwarm_up = 1\n\
         validation_sequences = 2\n[sparsity]\nmethod = \"dense\"\n"
    );
    fs::write(at.join(&recipe), &text).unwrap();
    harmless(run(at, &["train", &recipe, "--dry-run"])).good();
    let folder = format!("{HOSTILE}-run");
    harmless(run(at, &["train", &recipe, "-o", &folder])).good();
    let message = harmless(run(at, &["train", &recipe, "-o", &folder, "--set", "training.steps=5"])).bad(2);
    assert!(message.contains("another run") && message.lines().count() == 2, "{message}");
    fs::write(at.join(&folder).join("recipe.toml"), "[model]\nx = 1\n").unwrap();
    harmless(run(at, &["train", &recipe, "-o", &folder])).bad(2);
}

/// Runs a command on a terminal of 80 columns, optionally sends Ctrl-C once a progress bar is there, and prints the
/// exit code and what the terminal was sent, in hexadecimal.
const ON_A_TERMINAL: &str = r"
import fcntl, os, pty, select, struct, sys, termios, time
interrupts, command = sys.argv[1] == 'interrupt', sys.argv[2:]
child, terminal = pty.fork()
if child == 0:
    fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack('HHHH', 24, 80, 0, 0))
    os.environ['TERM'] = 'xterm'
    os.execv(command[0], command)
fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack('HHHH', 24, 80, 0, 0))
seen, sent, end = b'', False, time.monotonic() + 60
while time.monotonic() < end:
    if select.select([terminal], [], [], 0.2)[0]:
        try:
            data = os.read(terminal, 65536)
        except OSError:
            break
        if not data:
            break
        seen += data
    if interrupts and not sent and b'\x1b[2K' in seen:
        os.write(terminal, b'\x03')
        sent = True
else:
    os.kill(child, 9)
_, status = os.waitpid(child, 0)
print(os.waitstatus_to_exitcode(status), int(sent), seen.hex())
";

/// What a terminal shows after a run, its exit code, and whether a bar was there.
struct Seen {
    code: i32,
    interrupted: bool,
    /// The lines at the end, each of at most 80 columns.
    lines: Vec<String>,
    /// The longest line that was ever on it.
    longest: usize,
    bars: usize,
}

/// The command on a terminal; none where python3 is missing.
fn on_a_terminal(at: &Path, mode: &str, arguments: &[&str]) -> Option<Seen> {
    let command = Command::new("python3")
        .args(["-c", ON_A_TERMINAL, mode, env!("CARGO_BIN_EXE_twofour")])
        .args(arguments)
        .env_remove("NO_COLOR")
        .env_remove("TWOFOUR_LOG")
        .current_dir(at)
        .output();
    let Ok(output) = command else {
        eprintln!("skipped: python3 is not installed");
        return None;
    };
    let text = String::from_utf8(output.stdout).unwrap();
    let parts: Vec<&str> = text.split_whitespace().collect();
    let [code, interrupted, bytes] = parts[..] else { panic!("{}", String::from_utf8_lossy(&output.stderr)) };
    let bytes: Vec<u8> =
        (0..bytes.len() / 2).map(|i| u8::from_str_radix(&bytes[2 * i..2 * i + 2], 16).unwrap()).collect();
    let (lines, longest, bars) = shown(&String::from_utf8(bytes).unwrap());
    Some(Seen { code: code.parse().unwrap(), interrupted: interrupted == "1", lines, longest, bars })
}

/// The lines on a terminal without a right edge, the longest that was ever there, and how often a bar was drawn. Knows
/// the sequences that this program may send.
fn shown(sent: &str) -> (Vec<String>, usize, usize) {
    let (mut lines, mut row, mut column) = (vec![vec![]], 0, 0);
    let (mut longest, mut bars) = (0, 0);
    let mut characters = sent.chars();
    while let Some(character) = characters.next() {
        match character {
            '\r' => column = 0,
            '\n' => row += 1,
            '\x1b' => {
                assert_eq!(characters.next(), Some('['), "{sent:?}");
                let sequence: String = characters.by_ref().take_while_inclusive(|c| !c.is_ascii_alphabetic());
                match sequence.as_str() {
                    "2K" => {
                        bars += 1;
                        lines[row].clear();
                    }
                    "K" | "0K" => lines[row].truncate(column),
                    "1A" | "A" => row = row.saturating_sub(1),
                    "1B" | "B" => row += 1,
                    "?25l" | "?25h" => {}
                    styled if styled.ends_with('m') => {}
                    moved if moved.ends_with('A') => {
                        row = row.saturating_sub(moved.trim_end_matches('A').parse().unwrap())
                    }
                    other => panic!("{other:?} in {sent:?}"),
                }
            }
            other => {
                let line: &mut Vec<char> = &mut lines[row];
                line.resize(line.len().max(column + 1), ' ');
                line[column] = other;
                column += 1;
                longest = longest.max(line.len());
            }
        }
        lines.resize(lines.len().max(row + 1), vec![]);
    }
    (lines.into_iter().map(|line| line.into_iter().collect::<String>().trim_end().to_owned()).collect(), longest, bars)
}

/// Characters up to and with the first that ends.
trait TakeWhileInclusive {
    fn take_while_inclusive(self, goes_on: impl Fn(char) -> bool) -> String;
}

impl<I: Iterator<Item = char>> TakeWhileInclusive for I {
    fn take_while_inclusive(self, goes_on: impl Fn(char) -> bool) -> String {
        let mut text = String::new();
        for character in self {
            text.push(character);
            if !goes_on(character) {
                break;
            }
        }
        text
    }
}

#[test]
fn progress_fits_its_terminal_and_ctrl_c_leaves_no_trace_of_it() {
    let directory = tempfile::tempdir().unwrap();
    let at = directory.path();
    fs::write(at.join("text.txt"), "two of four\n".repeat(200_000)).unwrap();
    fs::write(
        at.join("recipe.toml"),
        "[model]\nlayers = 1\nwidth = 64\nheads = 2\ncontext = 64\n[data]\ntext = \"text.txt\"\n[training]\n\
         steps = 100000\nbatch = 8\n\
         [sparsity]\nmethod = \"ste\"\n",
    )
    .unwrap();
    let llama = fixture("llama").display().to_string();
    let before = names(at);
    for arguments in [
        &["eval", &llama, "--text", "text.txt"][..],
        &[
            "prune",
            &llama,
            "-o",
            "out",
            "--method",
            "wanda",
            "--calibration",
            "text.txt",
            "--samples",
            "20000",
            "--length",
            "16",
        ],
        &["train", "recipe.toml", "-o", "run"],
    ] {
        let Some(seen) = on_a_terminal(at, "interrupt", arguments) else { return };
        assert!(seen.interrupted, "{arguments:?}: {:?}", seen.lines);
        assert_eq!(seen.code, 130, "{arguments:?}: {:?}", seen.lines);
        assert!(seen.longest <= 80 && seen.bars > 0, "{arguments:?}: {}", seen.longest);
        assert_eq!(seen.lines.last().map(String::as_str), Some(""), "{arguments:?}: {:?}", seen.lines);
        let text = seen.lines.join("\n");
        assert!(!text.contains("=>") && !text.contains("^C"), "{arguments:?}: {text}");
        if arguments[0] == "train" {
            assert!(text.contains("saved at step") && text.contains("to go on"), "{text}");
            fs::remove_dir_all(at.join("run")).unwrap();
        }
        assert_eq!(names(at), before, "{arguments:?}");
    }
}

#[test]
fn a_person_is_told_what_to_do_with_a_model_that_writes() {
    let directory = tempfile::tempdir().unwrap();
    let llama = fixture("llama").display().to_string();
    let Some(seen) = on_a_terminal(directory.path(), "whole", &["generate", &llama, "--length", "3"]) else { return };
    let text = seen.lines.join("\n");
    assert!(seen.code == 0 && text.contains("Next: twofour eval") && text.contains("twofour check"), "{text}");
}

#[test]
fn tables_fit_a_terminal() {
    let (directory, _) = model();
    let at = directory.path();
    for arguments in [
        &["prune", "model.safetensors", "-o", "pruned.safetensors"][..],
        &["check", "pruned.safetensors"],
        &["compress", "pruned.safetensors", "-o", "small.safetensors"],
        &["quantize", "small.safetensors", "-o", "int8.safetensors", "--dtype", "int8"],
        &["decompress", "int8.safetensors", "-o", "dense.safetensors"],
        &["inspect", "int8.safetensors"],
    ] {
        let Some(seen) = on_a_terminal(at, "whole", arguments) else { return };
        let widest = seen.lines.iter().take_while(|line| !line.is_empty()).map(|line| line.chars().count()).max();
        assert!(seen.code == 0 && widest <= Some(80), "{arguments:?}: {widest:?} {:?}", seen.lines);
    }
}
