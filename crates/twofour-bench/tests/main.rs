//! The benchmarks as they are called: each file is a module of one program, so that one is linked.

mod blocks;
mod cpu;
mod cuda;
mod encoder;
mod generate;
mod grid;
mod support;
