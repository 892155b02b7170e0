//! CUDA C++ sources. Each kernel's module assembles its own; [`crate::kernels`] lists this crate's.

use std::borrow::Cow;

use sha2::{Digest, Sha256};

use crate::Architecture;

/// A file of a source.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct File {
    name: &'static str,
    text: Cow<'static, str>,
}

impl File {
    /// Returns a file embedded in a crate, with the name for the compiler's messages.
    pub const fn new(name: &'static str, text: &'static str) -> Self {
        Self { name, text: Cow::Borrowed(text) }
    }

    /// Returns a generated file.
    pub fn generated(name: &'static str, text: String) -> Self {
        Self { name, text: Cow::Owned(text) }
    }
}

/// The compute capabilities that a source supports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Support {
    /// This one and all later ones.
    From((u32, u32)),
    /// This one and all later ones, except some major versions.
    FromExcept((u32, u32), &'static [u32]),
    /// This one alone.
    Only((u32, u32)),
}

impl Support {
    /// Every architecture that this crate supports.
    pub const ALL: Self = Self::From((8, 0));

    /// Returns whether an architecture is supported.
    pub fn includes(self, architecture: Architecture) -> bool {
        let capability = architecture.capability();
        match self {
            Support::From(first) => capability >= first,
            Support::FromExcept(first, majors) => capability >= first && !majors.contains(&capability.0),
            Support::Only(only) => capability == only,
        }
    }
}

/// A CUDA C++ source and its definitions: the unit of compiling, loading and caching.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Source {
    name: String,
    support: Support,
    contracts_fma: bool,
    parts: Vec<Part>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Part {
    Definitions(String),
    File(File),
}

impl Source {
    /// Returns an empty source. Its name must be unique.
    pub fn new(name: String, support: Support) -> Self {
        Self { name, support, contracts_fma: false, parts: Vec::new() }
    }

    /// Lets the compiler contract multiplications and additions to FMA: for results that need not be bit for bit those of a CPU. The definition makes
    /// the text, and with it the digest, another one than that of the same source without FMA.
    #[must_use]
    pub fn with_fma(mut self) -> Self {
        self.contracts_fma = true;
        self.define("#define CONTRACTS_FMA 1\n")
    }

    /// Returns whether the compiler may contract multiplications and additions to FMA.
    pub(crate) fn contracts_fma(&self) -> bool {
        self.contracts_fma
    }

    /// Appends preprocessor definitions.
    #[must_use]
    pub fn define(mut self, definitions: impl Into<String>) -> Self {
        self.parts.push(Part::Definitions(definitions.into()));
        self
    }

    /// Appends files.
    #[must_use]
    pub fn with(mut self, files: impl IntoIterator<Item = File>) -> Self {
        self.parts.extend(files.into_iter().map(Part::File));
        self
    }

    /// Returns the unique name: that of the kernel and its parameters.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns whether the source supports an architecture.
    pub fn is_for(&self, architecture: Architecture) -> bool {
        self.support.includes(architecture)
    }

    /// Returns the complete text.
    pub fn text(&self) -> String {
        let mut text = String::new();
        for part in &self.parts {
            match part {
                Part::Definitions(definitions) => text += definitions,
                Part::File(File { name, text: file }) => text += &format!("#line 1 \"{name}\"\n{file}\n"),
            }
        }
        text
    }

    /// Returns the text's SHA-256.
    pub(crate) fn digest(&self) -> [u8; 32] {
        Sha256::digest(self.text()).into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_in_order_and_files_keep_their_names_and_line_numbers() {
        let source = Source::new("one".into(), Support::ALL).define("#define N 1\n");
        let source = source.with([File::new("a.cuh", "int a;"), File::generated("b", "int b;".into())]);
        assert_eq!(source.text(), "#define N 1\n#line 1 \"a.cuh\"\nint a;\n#line 1 \"b\"\nint b;\n");
    }

    #[test]
    fn support_follows_the_compute_capability() {
        let included = |support: Support| Architecture::ALL.map(|architecture| support.includes(architecture));
        assert_eq!(included(Support::ALL), [true; 6]);
        assert_eq!(included(Support::From((8, 9))), [false, false, true, true, true, true]);
        assert_eq!(included(Support::FromExcept((8, 9), &[9, 10])), [false, false, true, false, false, true]);
        assert_eq!(included(Support::Only((9, 0))), [false, false, false, true, false, false]);
    }
}
