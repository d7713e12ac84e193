//! PROVENANCE together with the patches that it lists: what a source is made of.

use crate::machine::toolchain::Wanted;
use crate::pins::Pin;
use crate::pins::PinnedPatch;
use crate::source;
use crate::store::Key;

/// PROVENANCE and the patches that it lists, both checked.
#[derive(Clone, Debug)]
pub struct Pins {
    /// The pin file.
    pub pin: Pin,
    /// The carried patches, in order.
    pub patches: Vec<PinnedPatch>,
}

impl Pins {
    /// The toolchain that is pinned.
    pub fn wanted(&self) -> Wanted {
        Wanted {
            channel: self.pin.toolchain.channel.to_string(),
            commit_hash: self.pin.toolchain.commit_hash.to_string(),
            components: self.pin.toolchain.components.clone(),
        }
    }

    /// The key of the patched source.
    pub fn source_key(&self) -> Key {
        source::key(&self.pin.source, &self.patches)
    }
}
