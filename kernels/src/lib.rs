//! The arithmetic of kiln's kernels.
