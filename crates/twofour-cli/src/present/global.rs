//! The options that every command has: how it presents what it does.

use clap::Args;

use super::style::ColorChoice;

/// Options that every command has.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Global options")]
pub struct Global {
    /// Print nothing but errors
    #[arg(long, short, global = true, conflicts_with = "json")]
    pub quiet: bool,

    /// Print one JSON object on stdout instead of text for people
    #[arg(long, global = true)]
    pub json: bool,

    /// Show every tensor, and log what happens to stderr; twice for details
    #[arg(long, short, global = true, action = clap::ArgAction::Count)]
    pub verbose: u8,

    /// When to use colors
    #[arg(long, global = true, value_enum, default_value_t, value_name = "WHEN")]
    pub color: ColorChoice,
}
