//! The verbs, one module each.

pub mod attest;
pub mod build;
pub mod bundle;
pub mod cli;
pub mod completions;
pub mod doctor;
pub mod explain;
pub mod gate;
pub mod gc;
pub mod man;
pub mod model;
pub mod pin;
pub mod ptx;
pub mod setup;
pub mod store;
pub mod verify;
