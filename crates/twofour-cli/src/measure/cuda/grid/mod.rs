//! The suite `grid`: the linear layers of models in use, at token counts from decode to prefill.
//!
//! | file | contents |
//! |---|---|
//! | `layers` | weights of models, and the cells: a weight, a data type and a number of tokens |
//! | `cell` | the times of one cell |
//! | `row` | the record of a cell |

mod cell;
mod layers;
mod row;

pub(crate) use cell::{CellTimes, GridTimer};
pub(crate) use layers::{GridCell, GridEpilogue, GridLayer, grid_cells, grid_layers};
pub(crate) use row::{Fault, GridRow, Unsupported};
