//! The verbs, one module each.

pub mod build;
pub mod completions;
pub mod doctor;
pub mod explain;
pub mod gate;
pub mod man;
pub mod model;
pub mod ptx;
pub mod setup;
