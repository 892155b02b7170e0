//! On a device: inference on the GPU against inference on the CPU. Without a device the tests skip; with `TWOFOUR_REQUIRE_GPU` set they fail.
#![cfg(feature = "cuda")]
