//! What models of images take beside the other layers: attention in windows with relative positions, neighbours, and
//! layer scale.

mod attention;
mod grid;

pub use attention::{ImageAttention, ImageAttentionTensors, image_attention};
pub use grid::{neighbours, scale_rows};
