//! kiln's toolchain manager: resolve what a build needs, explain it (`doctor`), make it (`setup`), use it
//! (`build`).
//!
//! Start reading at [`plan`]: every verb works on the same [`plan::Plan`].

pub mod base;
pub mod report;

pub mod pins;

pub mod machine;
pub mod ptx;

pub mod backend;
pub mod source;
pub mod store;

pub mod build;
pub mod gate;
pub mod plan;
pub mod repin;
pub mod setup;
pub mod verify;

pub mod cmd;
