//! Memory of the CPU engine.

use crate::{
    Error, Result,
    engine::{Buffer, Kind},
};

/// A vector: of f32, or of token indices.
#[derive(Debug, Clone)]
pub struct CpuBuffer {
    kind: Kind,
    floats: Vec<f32>,
    ids: Vec<u32>,
}

impl CpuBuffer {
    pub(super) fn zeros(kind: Kind, len: usize) -> Self {
        match kind {
            Kind::Index => CpuBuffer { kind, floats: vec![], ids: vec![0; len] },
            _ => CpuBuffer { kind, floats: vec![0.0; len], ids: vec![] },
        }
    }

    /// The elements of a buffer that is not of [`Kind::Index`].
    ///
    /// # Errors
    /// A buffer of that kind.
    pub fn floats(&self) -> Result<&[f32]> {
        self.expect_floats()?;
        Ok(&self.floats)
    }

    /// The same for writing.
    ///
    /// # Errors
    /// Those of [`CpuBuffer::floats`].
    pub fn floats_mut(&mut self) -> Result<&mut [f32]> {
        self.expect_floats()?;
        Ok(&mut self.floats)
    }

    /// The elements of a buffer of [`Kind::Index`].
    ///
    /// # Errors
    /// A buffer of another kind.
    pub fn ids(&self) -> Result<&[u32]> {
        match self.kind {
            Kind::Index => Ok(&self.ids),
            found => Err(Error::Kind { what: "a buffer of tokens", expected: Kind::Index, found }),
        }
    }

    pub(super) fn ids_mut(&mut self) -> Result<&mut [u32]> {
        self.ids()?;
        Ok(&mut self.ids)
    }

    fn expect_floats(&self) -> Result<()> {
        match self.kind {
            Kind::Index => {
                Err(Error::Kind { what: "a buffer of numbers", expected: Kind::Compute, found: Kind::Index })
            }
            _ => Ok(()),
        }
    }
}

impl Buffer for CpuBuffer {
    fn len(&self) -> usize {
        self.floats.len() + self.ids.len()
    }

    fn kind(&self) -> Kind {
        self.kind
    }
}

/// An error unless a buffer has so many elements.
pub(super) fn expect_length(what: &'static str, expected: usize, found: usize) -> Result<()> {
    if expected == found { Ok(()) } else { Err(Error::Length { what, expected, found }) }
}
