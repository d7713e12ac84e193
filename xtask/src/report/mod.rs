//! What people and programs are told: errors with their codes, decisions with their reasons, progress, results.

pub mod decision;
pub mod error;
pub mod output;
pub mod progress;
