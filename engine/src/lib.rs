//! kiln's inference engine.
