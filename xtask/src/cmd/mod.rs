//! The verbs, one module each.

pub mod build;
pub mod completions;
pub mod doctor;
pub mod explain;
pub mod man;
pub mod setup;
