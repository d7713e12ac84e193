//! kiln's toolchain manager: resolve what a build needs, explain it (`doctor`), make it (`setup`), use it
//! (`build`).
//!
//! Start reading at `plan`: every verb works on the same `Plan`.

pub mod arch;
pub mod cuda;
pub mod decision;
pub mod env;
pub mod error;
pub mod gpu;
pub mod llc;
pub mod probe;
pub mod process;
pub mod ptx;
