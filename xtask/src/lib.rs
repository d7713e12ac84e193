//! kiln's toolchain manager: resolve what a build needs, explain it (`doctor`), make it (`setup`), use it
//! (`build`).
//!
//! Start reading at `plan`: every verb works on the same `Plan`.

pub mod atomic;
pub mod cargo_config;
pub mod env;
pub mod error;
pub mod hash;
pub mod host_config;
pub mod pin;
pub mod process;
pub mod selection;
pub mod toml_context;
