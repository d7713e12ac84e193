//! A text that grows: what has been evaluated, and the loop that continues it.

use std::ops::ControlFlow;

use crate::backend::{Backend, Wanted};
use crate::error::{Error, Result};
use crate::sample::Sampler;
use crate::tokenizer::{TextStream, Tokenizer};

/// Why a generation stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// The model ended the text.
    End,
    /// As many tokens as asked for.
    Limit,
    /// The context is full.
    Context,
    /// The receiver of the text asked for it.
    Asked,
}

/// How far a generation may go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Tokens, if there is a limit besides the context.
    pub tokens: Option<usize>,
    /// Whether to go on after a token that ends the text.
    pub ignore_end: bool,
}

/// What a generation did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// Tokens that were made.
    pub tokens: usize,
    /// Why it stopped.
    pub stop: Stop,
}

/// A backend with the tokens that its cache holds.
pub struct Session {
    backend: Box<dyn Backend>,
    tokens: Vec<u32>,
    evaluated: usize,
}

impl Session {
    /// An empty text.
    pub fn new(backend: Box<dyn Backend>) -> Session {
        Session { backend, tokens: Vec::new(), evaluated: 0 }
    }

    /// The tokens so far.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// The backend.
    pub fn backend(&self) -> &dyn Backend {
        &*self.backend
    }

    /// Makes `tokens` the text, keeping what the cache holds of their common beginning, and returns how many tokens
    /// were evaluated. `proceed` is asked between batches.
    ///
    /// # Errors
    /// [`Error::Request`] if the tokens do not fit the context or are none; what a step returns.
    pub fn set(
        &mut self,
        tokens: &[u32],
        mut proceed: impl FnMut(usize) -> ControlFlow<()>,
    ) -> Result<usize> {
        let context = self.backend.context();
        if tokens.is_empty() {
            return Err(Error::Request("the prompt has no tokens".into()));
        }
        if tokens.len() > context {
            return Err(Error::Request(format!(
                "the prompt has {} tokens, the context holds {context}: shorten it or raise -c",
                tokens.len()
            )));
        }
        let held = &self.tokens[..self.evaluated];
        let common = held.iter().zip(tokens).take_while(|(a, b)| a == b).count();
        // The last token is always run: its logits are wanted.
        let start = common.min(tokens.len() - 1);
        self.tokens.clear();
        self.tokens.extend_from_slice(tokens);
        self.evaluated = start;
        let batch = self.backend.batch_size();
        while self.evaluated < tokens.len() {
            let end = tokens.len().min(self.evaluated + batch);
            let wanted = if end == tokens.len() { Wanted::Last } else { Wanted::Nothing };
            self.backend.run(&tokens[self.evaluated..end], self.evaluated, wanted)?;
            self.evaluated = end;
            if proceed(end - start).is_break() {
                break;
            }
        }
        Ok(self.evaluated - start)
    }

    /// Continues the text and hands out what is complete; `receive` may ask to stop.
    ///
    /// # Errors
    /// What a step returns.
    pub fn generate(
        &mut self,
        tokenizer: &Tokenizer,
        sampler: &mut Sampler,
        limits: Limits,
        mut receive: impl FnMut(&str) -> ControlFlow<()>,
    ) -> Result<Outcome> {
        let mut stream = TextStream::default();
        let mut made = 0;
        let stop = loop {
            if limits.tokens.is_some_and(|limit| made >= limit) {
                break Stop::Limit;
            }
            if self.evaluated < self.tokens.len() {
                break Stop::Asked;
            }
            let token = sampler.sample(self.backend.logits(), &self.tokens);
            if tokenizer.is_end(token) && !limits.ignore_end {
                break Stop::End;
            }
            made += 1;
            if receive(&stream.push(tokenizer, token)).is_break() {
                break Stop::Asked;
            }
            if self.tokens.len() >= self.backend.context() {
                break Stop::Context;
            }
            self.tokens.push(token);
            if limits.tokens == Some(made) {
                // Nobody will read the logits after the last token.
                break Stop::Limit;
            }
            self.backend.run(&[token], self.evaluated, Wanted::Last)?;
            self.evaluated += 1;
        };
        let _ = receive(&stream.finish());
        Ok(Outcome { tokens: made, stop })
    }
}
