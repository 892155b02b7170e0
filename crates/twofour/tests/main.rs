//! What the library promises outside: each file is a module of one program, so that one is linked.

mod criteria;
mod interrupted_writing;
mod joint_quantization;
mod layer;
mod peers;
mod prune_with;
mod roles;
mod safetensors_python;
mod sparsify;
