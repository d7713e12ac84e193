//! Where a model runs: the interface, and the CPU.

pub mod cpu;

use crate::error::Result;
use crate::sample;

/// How to load a model on any device.
#[derive(Clone, Copy, Debug)]
pub struct LoadOptions {
    /// Positions of the cache; at least 1.
    pub context: usize,
    /// Threads of the host.
    pub threads: usize,
    /// Columns of a batch; at least 1.
    pub batch: usize,
    /// Bytes of host memory that loading may take, if there is a limit.
    pub memory: Option<u64>,
}

/// Which columns of a batch get logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wanted {
    /// None: the batch only fills the cache.
    Nothing,
    /// The last token of the batch.
    Last,
    /// Every token of the batch; at most [`Backend::batch_size`] then.
    All,
}

/// A loaded model with a cache of keys and values.
///
/// The contract: the bits of logits and cache depend on the model file and on the tokens alone. Not on the number of
/// threads, on the instructions at hand, or on how the tokens are split into batches.
pub trait Backend: Send {
    /// What runs the model, for people: device, instructions, threads.
    fn description(&self) -> String;

    /// Positions that the cache holds.
    fn context(&self) -> usize;

    /// Columns of the largest batch that may ask for all logits.
    fn batch_size(&self) -> usize;

    /// Tokens that have logits.
    fn vocabulary(&self) -> usize;

    /// Runs `tokens` at `position` and the positions after it, which see everything before them in the cache.
    ///
    /// # Errors
    /// [`crate::Error::Request`] if a token is not in the vocabulary, the positions do not fit the context or do not
    /// follow what the cache holds, or more logits are wanted than a batch holds; [`crate::Error::NotFinite`] if a step
    /// makes a value that is not finite; [`crate::Error::Poisoned`] after a step that panicked.
    fn run(&mut self, tokens: &[u32], position: usize, wanted: Wanted) -> Result<()>;

    /// Logits of the last [`Backend::run`]: `vocabulary` numbers for each wanted column, in order.
    fn logits(&self) -> &[f32];

    /// Runs `token` at `position`, as [`Backend::run`] does, and returns the token that follows best: that of the largest
    /// logit ([`sample::best`]). Afterwards [`Backend::logits`] may be empty: a device need not bring them to the host, and
    /// it may keep the token where the next call takes it from.
    ///
    /// # Errors
    /// As for [`Backend::run`].
    fn run_best(&mut self, token: u32, position: usize) -> Result<u32> {
        self.run(&[token], position, Wanted::Last)?;
        Ok(sample::best(self.logits()))
    }

    /// Bytes of weights that a single token reads.
    fn weight_bytes(&self) -> u64;
}
