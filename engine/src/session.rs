//! A text that grows: what has been evaluated, and the loop that continues it.

use std::ops::ControlFlow;

use crate::backend::{Backend, Column, Selection, SequenceId, Wanted};
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
    /// The next token, if the last step selected it and may have left no logits.
    next: Option<u32>,
    /// Whether the last token is not run only because a limit was reached with it.
    reached_limit: bool,
    columns: Vec<Column>,
}

impl Session {
    /// An empty text.
    pub fn new(backend: Box<dyn Backend>) -> Session {
        Session {
            backend,
            tokens: Vec::new(),
            evaluated: 0,
            next: None,
            reached_limit: false,
            columns: Vec::new(),
        }
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
        self.next = None;
        self.reached_limit = false;
        let batch = self.backend.preferred_columns().max(1);
        while self.evaluated < tokens.len() {
            let end = tokens.len().min(self.evaluated + batch);
            let wanted = if end == tokens.len() { Wanted::Last } else { Wanted::Nothing };
            self.columns.clear();
            let part = &tokens[self.evaluated..end];
            self.columns.extend(Column::of(SequenceId(0), part, self.evaluated, wanted));
            self.backend.step(&self.columns, Selection::Logits)?;
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
                // All but the last: the prompt was stopped. The last alone: a text that reached its limit goes on.
                if self.evaluated + 1 < self.tokens.len() || !self.reached_limit {
                    break Stop::Asked;
                }
                let last = self.tokens[self.evaluated];
                self.next = None;
                self.backend.run(&[last], self.evaluated, Wanted::Last)?;
                self.evaluated += 1;
            }
            self.reached_limit = false;
            let token = self.choose(sampler)?;
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
                // Nobody will read the logits after the last token, unless the text goes on.
                self.reached_limit = true;
                break Stop::Limit;
            }
            self.next = None;
            if sampler.is_greedy() {
                self.next = Some(self.backend.run_greedy(token, self.evaluated)?);
            } else {
                self.logits_of(token, self.evaluated)?;
            }
            self.evaluated += 1;
        };
        let _ = receive(&stream.finish());
        Ok(Outcome { tokens: made, stop })
    }

    fn logits_of(&mut self, token: u32, position: usize) -> Result<()> {
        let column = Column { token, sequence: SequenceId(0), position, output: true };
        self.backend.step(&[column], Selection::Logits).map(drop)
    }

    /// The next token: the one that the backend chose, or the sampler's choice.
    fn choose(&mut self, sampler: &mut Sampler) -> Result<u32> {
        if let Some(next) = self.next {
            if sampler.is_greedy() {
                return Ok(next);
            }
            // Another sampler than the one before: it needs the logits.
            let last = self.evaluated - 1;
            self.logits_of(self.tokens[last], last)?;
            self.next = None;
        }
        Ok(sampler.sample(self.backend.logits(), &self.tokens))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::Output;
    use crate::backend::cpu::{Cpu, Options};
    use crate::model::Model;
    use crate::sample::Settings;

    /// A backend that keeps its logits for itself where it may, as a card does.
    struct Reserved {
        cpu: Cpu,
        silent: bool,
        kept: bool,
    }

    impl Backend for Reserved {
        fn description(&self) -> String {
            self.cpu.description()
        }
        fn context(&self) -> usize {
            self.cpu.context()
        }
        fn batch_size(&self) -> usize {
            self.cpu.batch_size()
        }
        fn vocabulary(&self) -> usize {
            self.cpu.vocabulary()
        }
        fn sequences(&self) -> usize {
            self.cpu.sequences()
        }
        fn preferred_columns(&self) -> usize {
            self.cpu.preferred_columns()
        }
        fn step(&mut self, columns: &[Column], selection: Selection) -> Result<Output<'_>> {
            self.kept = self.silent && selection == Selection::Greedy;
            self.cpu.step(columns, selection)
        }
        fn logits(&self) -> &[f32] {
            if self.kept { &[] } else { self.cpu.logits() }
        }
        fn weight_bytes(&self) -> u64 {
            self.cpu.weight_bytes()
        }
    }

    fn texts(silent: bool, samplings: &[Settings]) -> Vec<Vec<u32>> {
        let model = Model::from_gguf(crate::builtin().expect("built in")).expect("a model");
        let tokenizer = Tokenizer::from_gguf(&model.file).expect("a tokenizer");
        let tokens = tokenizer.encode("Once upon a time", true, false);
        let cpu = Cpu::load(model, Options::new(96, 1)).expect("it loads");
        let mut session = Session::new(Box::new(Reserved { cpu, silent, kept: false }));
        session.set(&tokens, |_| ControlFlow::Continue(())).expect("it fits");
        let mut texts = Vec::new();
        for settings in samplings {
            let mut sampler = Sampler::new(*settings);
            // Stopped by the receiver, so that the last token is not run and the next sampler goes on after it.
            let mut left = 12;
            let limits = Limits { tokens: None, ignore_end: true };
            let receive = |_: &str| {
                left -= 1;
                if left == 0 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
            };
            session.generate(&tokenizer, &mut sampler, limits, receive).expect("steps");
            texts.push(session.tokens().to_vec());
        }
        texts
    }

    #[test]
    fn a_text_that_reached_its_limit_goes_on() {
        for settings in [
            Settings { temperature: 0.0, ..Settings::default() },
            Settings { seed: 9, ..Settings::default() },
        ] {
            let text = |limits: &[usize]| {
                let model = Model::from_gguf(crate::builtin().expect("built in")).expect("a model");
                let tokenizer = Tokenizer::from_gguf(&model.file).expect("a tokenizer");
                let tokens = tokenizer.encode("Once upon a time", true, false);
                let cpu = Cpu::load(model, Options::new(96, 1)).expect("it loads");
                let mut session = Session::new(Box::new(cpu));
                let mut sampler = Sampler::new(settings);
                session.set(&tokens, |_| ControlFlow::Continue(())).expect("it fits");
                for limit in limits {
                    let limits = Limits { tokens: Some(*limit), ignore_end: true };
                    let outcome = session
                        .generate(&tokenizer, &mut sampler, limits, |_| ControlFlow::Continue(()))
                        .expect("steps");
                    assert_eq!(outcome.tokens, *limit);
                }
                session.tokens().to_vec()
            };
            assert_eq!(text(&[4, 5, 3]), text(&[12]));
        }
    }

    #[test]
    fn a_backend_that_chooses_gives_the_tokens_of_the_sampler() {
        let greedy = Settings { temperature: 0.0, ..Settings::default() };
        let penalty = Settings { repeat_penalty: 1.3, ..greedy };
        let random = Settings { seed: 4, ..Settings::default() };
        for samplings in [&[greedy][..], &[penalty], &[greedy, random, greedy, penalty, greedy]] {
            let (kept, shown) = (texts(true, samplings), texts(false, samplings));
            assert_eq!(kept, shown);
            assert!(kept.last().is_some_and(|text| text.len() > 10));
        }
        // Against the sampler on all logits, which a penalty of next to nothing makes it look at.
        let looking = Settings { repeat_penalty: 1.0 + f32::EPSILON, repeat_last: 0, ..greedy };
        assert_eq!(texts(true, &[greedy]), texts(false, &[looking]));
    }
}
