//! kiln's toolchain manager: resolve what a build needs, explain it (`doctor`), make it (`setup`), use it
//! (`build`).
//!
//! Start reading at [`plan`]: every verb works on the same [`plan::Plan`].

pub mod arch;
pub mod archive;
pub mod atomic;
pub mod backend;
pub mod binary_diff;
pub mod bundle;
pub mod cargo_config;
pub mod checkout;
pub mod checkpoint;
pub mod child;
pub mod cli;
pub mod cmd;
pub mod cuda;
pub mod cuda_wheels;
pub mod decision;
pub mod download;
pub mod env;
pub mod error;
pub mod gate;
pub mod gpu;
pub mod hash;
pub mod host_config;
pub mod interrupt;
pub mod inventory;
pub mod llc;
pub mod lock;
pub mod model;
pub mod nar;
pub mod nvvm;
pub mod output;
pub mod patch;
pub mod pin;
pub mod plan;
pub mod probe;
pub mod process;
pub mod progress;
pub mod ptx;
pub mod ptx_record;
pub mod record;
pub mod repin;
pub mod roots;
pub mod selection;
pub mod source;
pub mod store;
mod toml_context;
pub mod toolchain;
pub mod vendor;
