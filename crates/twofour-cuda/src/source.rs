//! CUDA C++ sources. Each kernel's module assembles its own; [`crate::kernels`] lists this crate's.

use std::borrow::Cow;

use sha2::{Digest, Sha256};

use crate::{Architecture, Error, Result, architecture::Float8};

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

/// The architectures that a source supports: what it requires of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Support {
    float8: Float8,
    wgmma: bool,
    /// The capability, for an error.
    needs: &'static str,
}

impl Support {
    /// Every architecture that this crate supports.
    pub const ALL: Self = Self { float8: Float8::Missing, wgmma: false, needs: "8.0 (Ampere) or later" };
    /// Those with 8-bit floats.
    pub const FLOAT8: Self = Self { float8: Float8::Emulated, needs: "8.9 (Ada) or later", ..Self::ALL };
    /// Those whose products of 8-bit floats are instructions of their own.
    pub const NATIVE_FLOAT8: Self = Self { float8: Float8::Native, needs: "8.9 (Ada) or 12.0", ..Self::ALL };
    /// Those with `wgmma` and TMA.
    pub const WGMMA: Self = Self { wgmma: true, needs: "9.0 (Hopper)", ..Self::ALL };

    /// Returns whether an architecture is supported.
    pub fn includes(self, architecture: Architecture) -> bool {
        let features = architecture.features();
        features.float8 >= self.float8 && (features.wgmma || !self.wgmma)
    }

    /// Returns an error for an architecture that is not supported.
    ///
    /// # Errors
    /// [`Error::Unsupported`].
    pub fn expect(self, operation: &'static str, architecture: Architecture) -> Result<()> {
        let (major, minor) = architecture.capability();
        let unsupported = Error::Unsupported { operation, major, minor, needs: self.needs };
        if self.includes(architecture) { Ok(()) } else { Err(unsupported) }
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

    /// Lets the compiler contract multiplications and additions to FMA: for results that need not be bit for bit those
    /// of a CPU. The definition makes the text, and with it the digest, another one than that of the same source
    /// without FMA.
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

    /// Returns an error for an architecture that the source does not support.
    pub(crate) fn expect(&self, operation: &'static str, architecture: Architecture) -> Result<()> {
        self.support.expect(operation, architecture)
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

    /// Adds the source to a digest of several, comments left out. A file that is embedded in this crate is added once,
    /// when `is_new` says so of its name.
    pub(crate) fn add_code_to(&self, digest: &mut Sha256, mut is_new: impl FnMut(&'static str) -> bool) {
        digest.update(&self.name);
        for part in &self.parts {
            match part {
                Part::Definitions(definitions) => digest.update(definitions),
                Part::File(File { name, text: Cow::Borrowed(_) }) if !is_new(name) => digest.update(name),
                Part::File(File { name, text }) => {
                    digest.update(name);
                    digest.update(without_comments(text));
                }
            }
        }
    }

    /// Returns the text's SHA-256.
    pub(crate) fn digest(&self) -> [u8; 32] {
        Sha256::digest(self.text()).into()
    }
}

/// Returns a source's lines of code, each without its comment and surrounding space.
fn without_comments(text: &str) -> String {
    let code = text.lines().map(|line| line.split("//").next().unwrap_or("").trim());
    code.filter(|line| !line.is_empty()).flat_map(|line| [line, "\n"]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comments_and_their_lines_do_not_count() {
        assert_eq!(without_comments("// What it is.\n\n  int a; // One.\nint b;\n"), "int a;\nint b;\n");
    }

    #[test]
    fn parts_are_in_order_and_files_keep_their_names_and_line_numbers() {
        let source = Source::new("one".into(), Support::ALL).define("#define N 1\n");
        let source = source.with([File::new("a.cuh", "int a;"), File::generated("b", "int b;".into())]);
        assert_eq!(source.text(), "#define N 1\n#line 1 \"a.cuh\"\nint a;\n#line 1 \"b\"\nint b;\n");
    }

    #[test]
    fn support_follows_the_features() {
        let included = |support: Support| Architecture::ALL.map(|architecture| support.includes(architecture));
        assert_eq!(included(Support::ALL), [true; 6]);
        assert_eq!(included(Support::FLOAT8), [false, false, true, true, true, true]);
        assert_eq!(included(Support::NATIVE_FLOAT8), [false, false, true, false, false, true]);
        assert_eq!(included(Support::WGMMA), [false, false, false, true, false, false]);
    }
}
