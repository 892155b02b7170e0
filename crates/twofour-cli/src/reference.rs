//! docs/reference/cli.md is what `--help` of every command prints.

use std::path::Path;

use clap::CommandFactory;

use crate::arguments::Arguments;

const BEGIN: &str = "# The command line

What `--help` prints, for every command. Options that all commands have stand under [twofour](#twofour) alone. After a
change of the command line, `TWOFOUR_WRITE_REFERENCE=1 cargo test -p twofour-cli --lib reference` writes this page anew.
";

/// Returns the page.
fn reference() -> String {
    let mut command = Arguments::command().term_width(100);
    command.build();
    let mut page = BEGIN.to_owned();
    add(&mut page, "twofour", &command.render_long_help().to_string());
    for command in
        command.get_subcommands_mut().filter(|command| !command.is_hide_set() && command.get_name() != "help")
    {
        let name = format!("twofour {}", command.get_name());
        add(&mut page, &name, &without_global_options(&command.render_long_help().to_string()));
    }
    page
}

fn add(page: &mut String, name: &str, help: &str) {
    let lines: Vec<&str> = help.trim_end().lines().map(str::trim_end).collect();
    page.push_str(&format!("\n## {name}\n\n```text\n{}\n```\n", lines.join("\n")));
}

/// Removes the section of the options that every command has, which ends with the next line that is not indented.
fn without_global_options(help: &str) -> String {
    let mut is_global = false;
    let kept = help.lines().filter(|line| {
        if *line == "Global options:" {
            is_global = true;
        } else if !line.is_empty() && !line.starts_with(' ') {
            is_global = false;
        }
        !is_global
    });
    kept.collect::<Vec<_>>().join("\n")
}

#[test]
fn the_reference_of_the_command_line_is_what_help_prints() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/reference/cli.md");
    let expected = reference();
    if std::env::var_os("TWOFOUR_WRITE_REFERENCE").is_some() {
        std::fs::write(&path, &expected).unwrap();
    }
    let found = std::fs::read_to_string(&path).unwrap().replace("\r\n", "\n");
    let stale = expected.lines().zip(found.lines()).find(|(expected, found)| expected != found);
    assert!(
        found == expected,
        "docs/reference/cli.md is stale: {stale:?}; write it anew by \
         TWOFOUR_WRITE_REFERENCE=1 cargo test -p twofour-cli --lib reference"
    );
}

#[test]
fn the_options_that_every_command_has_are_cut_out_of_the_middle() {
    let help = "Options:\n  -o\n\nGlobal options:\n  -q\n\n  -v\n\nExamples:\n  twofour";
    assert_eq!(without_global_options(help), "Options:\n  -o\n\nExamples:\n  twofour");
}
