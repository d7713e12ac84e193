//! Where a model runs: the interface, and the CPU.

mod columns;
pub mod cpu;

pub use columns::{Candidate, Column, Output, Positions, Selection, Selector, SequenceId};

use crate::error::Result;

/// How to load a model on any device.
#[derive(Clone, Copy, Debug)]
pub struct LoadOptions {
    /// Positions of the cache for each sequence; at least 1.
    pub context: usize,
    /// Sequences that the cache holds; at least 1.
    pub sequences: usize,
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
/// The contract: the bits of logits and cache of a sequence depend on the model file and on the sequence's tokens alone.
/// Not on the number of threads, on the instructions at hand, on how the tokens are split into steps, or on the other
/// sequences in them.
pub trait Backend: Send {
    /// What runs the model, for people: device, instructions, threads.
    fn description(&self) -> String;

    /// Positions that the cache holds of a sequence.
    fn context(&self) -> usize;

    /// Sequences that the cache holds.
    fn sequences(&self) -> usize;

    /// Outputs of a step at most.
    fn batch_size(&self) -> usize;

    /// Columns of a step that serve a long prompt best.
    fn preferred_columns(&self) -> usize;

    /// Tokens that have logits.
    fn vocabulary(&self) -> usize;

    /// Runs columns, of any number of sequences in any order, and selects from the logits of those with
    /// [`Column::output`], in order. The columns of a sequence are at consecutive positions; the first of them follows
    /// what the cache holds of the sequence or takes the place of some of it, with all after it.
    ///
    /// With [`Selection::Greedy`] a device need not bring the logits to the host, and it may keep the token where the next
    /// step takes it from.
    ///
    /// # Errors
    /// [`crate::Error::Request`] if a token is not in the vocabulary or a sequence not among those that the cache holds,
    /// if positions do not fit the context or do not follow what the cache holds, if there are more outputs than
    /// [`Backend::batch_size`], or if the largest 0 logits are asked for; [`crate::Error::NotFinite`] if a step makes a
    /// value that is not finite; [`crate::Error::Poisoned`] after a step that panicked.
    fn step(&mut self, columns: &[Column], selection: Selection) -> Result<Output<'_>>;

    /// Logits of the last step if it selected [`Selection::Logits`]: `vocabulary` numbers for each output, in order. They
    /// may be empty after another selection.
    fn logits(&self) -> &[f32];

    /// A step of sequence 0 alone that selects [`Selection::Logits`]: `tokens` at `position` and the positions after it.
    ///
    /// # Errors
    /// As for [`Backend::step`].
    fn run(&mut self, tokens: &[u32], position: usize, wanted: Wanted) -> Result<()> {
        let columns: Vec<Column> = Column::of(SequenceId(0), tokens, position, wanted).collect();
        self.step(&columns, Selection::Logits).map(drop)
    }

    /// A step of sequence 0 alone that runs `token` at `position` and selects [`Selection::Greedy`].
    ///
    /// # Errors
    /// As for [`Backend::step`].
    fn run_greedy(&mut self, token: u32, position: usize) -> Result<u32> {
        let column = Column { token, sequence: SequenceId(0), position, output: true };
        match self.step(&[column], Selection::Greedy)? {
            Output::Greedy([token]) => Ok(*token),
            other => unreachable!("a greedy step of one output gives a token, not {other:?}"),
        }
    }

    /// Bytes of weights that a single token reads.
    fn weight_bytes(&self) -> u64;
}
