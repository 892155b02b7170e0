//! Training and running whole models with 2:4 sparsity.
//!
//! | module | contents |
//! |---|---|
//! | [`recipe`] | the settings of a training run, as a TOML file has them |

pub mod recipe;
