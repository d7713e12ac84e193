//! kiln's toolchain manager: resolve what a build needs, explain it (`doctor`), make it (`setup`), use it
//! (`build`).
//!
//! Start reading at `plan`: every verb works on the same `Plan`.

pub mod archive;
pub mod download;
pub mod env;
pub mod error;
pub mod hash;
pub mod nar;
pub mod patch;
pub mod process;
pub mod progress;
