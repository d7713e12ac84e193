//! The verbs, one module each.

pub mod attest;
pub mod build;
pub mod bundle;
pub mod doctor;
pub mod explain;
pub mod gc;
pub mod pin;
pub mod setup;
pub mod store;
pub mod verify;
