//! The same model, from whatever format to safetensors.

use std::convert::Infallible;

use super::{Item, Kept, Operation, Plan, Planned, Reader, Writer};
use crate::Result;

/// Writes every tensor as it is read: what a file in another format holds, in safetensors.
#[derive(Debug, Clone, Copy, Default)]
pub struct Unchanged;

impl Operation for Unchanged {
    type Plan = Infallible;
    type Change = Infallible;

    fn plan(&mut self, _: &Reader, _: Item<'_>, _: &mut Plan) -> Result<Planned<Infallible>> {
        Ok(Planned::Copy(Kept::NotChosen))
    }

    fn write(&mut self, _: &Reader, _: Item<'_>, planned: Infallible, _: &mut Writer) -> Result<Infallible> {
        match planned {}
    }
}
