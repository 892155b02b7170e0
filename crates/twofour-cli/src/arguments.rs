//! The command line.

use anyhow::Result;
use clap::{CommandFactory, Parser, Subcommand};

use crate::{
    commands,
    exit::Verdict,
    measure,
    present::{Global, Screen},
};

/// 2:4 sparsity for neural networks: prune, check, compress, train and run it, and see what it gains on this machine.
///
/// In a 2:4 weight two of every four consecutive elements of a row are zero. The other two and 4 bits of metadata for
/// their positions take 9/16 of the bytes of dense bf16, and kernels that skip the zeros read and multiply less.
#[derive(Debug, Parser)]
#[command(
    name = "twofour",
    bin_name = "twofour",
    version,
    propagate_version = true,
    infer_subcommands = false,
    arg_required_else_help = true,
    max_term_width = 100,
    after_help = "Exit codes: 0 done, 1 failed (or `check` found a violation), 2 usage error, 130 interrupted.",
    after_long_help = AFTER_LONG_HELP
)]
pub(crate) struct Arguments {
    #[command(flatten)]
    pub(crate) global: Global,

    #[command(subcommand)]
    pub(crate) command: Command,
}

const AFTER_LONG_HELP: &str = "\
Start here:
  twofour quickstart                           train small models, dense and 2:4
  twofour advise model.safetensors             is 2:4 faster here, for it?
  twofour train recipes/ste.toml -o runs/ste   sparse training from a recipe
  twofour prune model.safetensors -o pruned.safetensors
  twofour check pruned.safetensors
  twofour compress pruned.safetensors -o small.safetensors
  twofour quantize pruned/ -o int4/ --dtype int4   2:4 weights in four bits

A model is a .safetensors file, a *.safetensors.index.json of a sharded one, a directory that holds either, a .gguf \
file, or one of torch.save, such as pytorch_model.bin.

Environment:
  TWOFOUR_ENGINE      kernel engine: scalar, neon, avx2, avx512 or amx
  TWOFOUR_CACHE       folder for compiled GPU kernels
  TWOFOUR_NVRTC       folder of NVRTC, which compiles them
  TWOFOUR_LOG         log filter, such as twofour=trace; wins over --verbose
  RAYON_NUM_THREADS   threads to compute with, at most those of the machine
  NO_COLOR            no colors, whatever the terminal

Exit codes:
  0    done
  1    failed, or `check` found a tensor that violates the pattern
  2    usage error
  130  interrupted";

/// The commands, in the order of `--help`. Each has a method `run`.
macro_rules! commands {
    ($($name:ident($module:ident::$type:ident),)*) => {
        /// The command.
        #[derive(Debug, Subcommand)]
        pub(crate) enum Command {
            $($name(commands::$module::$type),)*
            Completions(commands::completions::Completions),
            Man(commands::man::Man),
            /// Measure the request on stdin; started by other commands
            #[command(hide = true)]
            MeasureWorker,
        }

        impl Command {
            /// Runs the command.
            pub(crate) fn run(self, screen: &mut Screen) -> Result<Verdict> {
                match self {
                    $(Command::$name(command) => command.run(screen),)*
                    Command::Completions(command) => command.run(Arguments::command(), screen),
                    Command::Man(command) => command.run(Arguments::command(), screen),
                    Command::MeasureWorker => measure::work(),
                }
            }
        }
    };
}

commands! {
    Quickstart(quickstart::Quickstart),
    Check(check::Check),
    Advise(advise::Advise),
    Prune(prune::Prune),
    Sensitivity(sensitivity::Sensitivity),
    Shrink(shrink::Shrink),
    Train(train::Train),
    Compress(compress::Compress),
    Quantize(quantize::Quantize),
    Decompress(decompress::Decompress),
    Convert(convert::ConvertModel),
    Merge(merge::Merge),
    Inspect(inspect::Inspect),
    Eval(eval::Eval),
    Generate(generate::Generate),
    Kernels(kernels::Kernels),
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        super::Arguments::command().debug_assert();
    }

    /// Calls a function with every command, those of commands included.
    fn each(command: &mut clap::Command, look: &mut dyn FnMut(&mut clap::Command)) {
        look(command);
        command.get_subcommands_mut().for_each(|command| each(command, look));
    }

    /// Columns of a usual terminal. Help is wrapped to the terminal's, and an example that was broken there would be no
    /// command.
    const COLUMNS: usize = 80;

    /// Whether a line of help's end is text that may be wrapped, or a heading; others are examples and tables, which
    /// are indented.
    fn is_text(line: &str) -> bool {
        !line.starts_with(' ')
    }

    #[test]
    fn examples_and_tables_of_help_are_never_wrapped_and_commands_are_whole() {
        let mut command = super::Arguments::command();
        command.build();
        let (mut faults, mut examples) = (Vec::new(), 0);
        let commands = std::iter::once(&command).chain(command.get_subcommands());
        for command in commands {
            let name = command.get_name().to_owned();
            let help = command.get_after_long_help().map(ToString::to_string).unwrap_or_default();
            let lines: Vec<&str> = help.lines().collect();
            for (i, line) in lines.iter().enumerate() {
                let next = lines.get(i + 1).copied().unwrap_or_default();
                let previous = i.checked_sub(1).map_or("", |i| lines[i]);
                let is_wrapped = line.chars().count() > COLUMNS;
                let is_continued = previous.ends_with('\\');
                examples += usize::from(line.starts_with("  twofour "));
                let fault = match is_text(line) {
                    true if is_wrapped && !next.is_empty() => "text that is wrapped goes on in a line of its own",
                    false if is_wrapped => "an example or a row of a table is wrapped",
                    false if line.ends_with('\\') && !next.starts_with("      ") => {
                        "a command goes on without indentation"
                    }
                    false if is_continued && !line.starts_with("      ") => "a command goes on without indentation",
                    false if line.starts_with("      --") && !is_continued => "a command goes on without a backslash",
                    _ => continue,
                };
                faults.push(format!("{name}: {fault}: {line}"));
            }
        }
        assert!(faults.is_empty(), "{}", faults.join("\n"));
        assert!(examples > 40, "{examples}");
    }

    #[test]
    fn help_fits_100_columns_and_ends_with_the_options_that_all_commands_have() {
        let mut command = super::Arguments::command();
        command.build();
        let (mut long, mut seen) = (Vec::new(), 0);
        each(&mut command, &mut |command| {
            let name = command.get_name().to_owned();
            for help in [command.render_help(), command.render_long_help()].map(|help| help.to_string()) {
                let lines = help.lines().filter(|line| line.chars().count() > 100);
                long.extend(lines.map(|line| format!("{name}: {line}")));
                if let (Some(own), Some(global)) = (help.find("\nOptions:"), help.find("\nGlobal options:")) {
                    assert!(own < global && help[global..].contains("--quiet"), "{help}");
                    assert!(!help[own..global].contains("--quiet"), "{help}");
                    seen += 1;
                }
            }
        });
        assert!(long.is_empty(), "{}", long.join("\n"));
        assert!(seen > 20, "{seen}");
    }
}
