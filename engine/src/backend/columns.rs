//! What a step takes and gives: columns of several sequences, and what of their logits is wanted.

use kiln_kernels::math;

use super::Wanted;
use crate::error::{Error, Result};

/// A sequence of tokens with its own place in the cache, from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SequenceId(pub u32);

/// A token to run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Column {
    /// The token.
    pub token: u32,
    /// The sequence that it continues.
    pub sequence: SequenceId,
    /// Its position there, from 0. It sees the sequence's positions up to its own.
    pub position: usize,
    /// Whether the step selects from its logits.
    pub output: bool,
}

impl Column {
    /// Columns of `tokens` at `position` and after it.
    pub fn of<'a>(
        sequence: SequenceId,
        tokens: &'a [u32],
        position: usize,
        wanted: Wanted,
    ) -> impl Iterator<Item = Column> + 'a {
        let last = tokens.len().wrapping_sub(1);
        tokens.iter().enumerate().map(move |(number, token)| Column {
            token: *token,
            sequence,
            position: position.saturating_add(number),
            output: wanted == Wanted::All || wanted == Wanted::Last && number == last,
        })
    }

    /// How many of the first columns are one sequence's at consecutive positions, `most` at most, with logits of none, of
    /// the last or of all of them: for backends that run such columns at once.
    pub fn leading_run(columns: &[Column], most: usize) -> (usize, Wanted) {
        let Some(first) = columns.first() else { return (0, Wanted::Nothing) };
        let mut count = 0;
        let mut wanted = if first.output { Wanted::All } else { Wanted::Nothing };
        for column in &columns[..columns.len().min(most)] {
            if column.sequence != first.sequence || column.position != first.position + count {
                break;
            }
            match (wanted, column.output) {
                (Wanted::All, true) | (Wanted::Nothing, false) => count += 1,
                (Wanted::Nothing, true) => return (count + 1, Wanted::Last),
                _ => break,
            }
        }
        if (count, wanted) == (1, Wanted::All) {
            wanted = Wanted::Last;
        }
        (count, wanted)
    }
}

/// What of the logits a step gives, for each column with [`Column::output`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Selection {
    /// All of them.
    Logits,
    /// The token of the largest; of equals the first.
    Greedy,
    /// This many of the largest, at least 1: the largest first, +0 above -0, and of equals the first token first.
    TopK(usize),
}

/// A token with its logit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Candidate {
    /// The token.
    pub token: u32,
    /// Its logit.
    pub logit: f32,
}

/// What a step gives, column after column.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Output<'a> {
    /// As many logits a column as the vocabulary has tokens.
    Logits(&'a [f32]),
    /// A token a column.
    Greedy(&'a [u32]),
    /// As many candidates a column as asked for, or the vocabulary if that is smaller.
    TopK(&'a [Candidate]),
}

/// Selects on the host.
#[derive(Debug, Default)]
pub struct Selector {
    tokens: Vec<u32>,
    candidates: Vec<Candidate>,
    sorted: Vec<Candidate>,
}

impl Selector {
    /// Selects from whole columns of logits.
    pub fn select<'a>(
        &'a mut self,
        logits: &'a [f32],
        vocabulary: usize,
        selection: Selection,
    ) -> Output<'a> {
        let columns = logits.chunks_exact(vocabulary);
        match selection {
            Selection::Logits => Output::Logits(logits),
            Selection::Greedy => {
                self.tokens.clear();
                self.tokens.extend(columns.map(|logits| math::argmax(logits) as u32));
                Output::Greedy(&self.tokens)
            }
            Selection::TopK(count) => {
                self.candidates.clear();
                let order =
                    |a: &Candidate, b: &Candidate| b.logit.total_cmp(&a.logit).then(a.token.cmp(&b.token));
                for logits in columns {
                    self.sorted.clear();
                    let all = logits.iter().zip(0..);
                    self.sorted.extend(all.map(|(logit, token)| Candidate { token, logit: *logit }));
                    if (1..vocabulary).contains(&count) {
                        self.sorted.select_nth_unstable_by(count - 1, order);
                        self.sorted.truncate(count);
                    }
                    self.sorted.sort_unstable_by(order);
                    self.candidates.extend_from_slice(&self.sorted);
                }
                Output::TopK(&self.candidates)
            }
        }
    }

    /// The token that a device selected itself.
    pub fn selected(&mut self, token: u32) -> Output<'_> {
        self.tokens.clear();
        self.tokens.push(token);
        Output::Greedy(&self.tokens)
    }
}

/// How many positions of each sequence the cache holds.
#[derive(Debug)]
pub struct Positions {
    context: usize,
    filled: Vec<usize>,
    /// The position that a step's next column of each sequence must have.
    next: Vec<Option<usize>>,
}

impl Positions {
    /// None of so many sequences, of `context` positions each.
    pub fn new(sequences: usize, context: usize) -> Positions {
        Positions { context, filled: vec![0; sequences], next: vec![None; sequences] }
    }

    /// How many sequences there are.
    pub fn sequences(&self) -> usize {
        self.filled.len()
    }

    /// Checks a step before anything is run.
    ///
    /// # Errors
    /// [`Error::Request`], as [`super::Backend::step`] says.
    pub fn check(
        &mut self,
        columns: &[Column],
        selection: Selection,
        vocabulary: usize,
        batch: usize,
    ) -> Result<()> {
        let refused = |problem| Err(Error::Request(problem));
        if let Some(column) = columns.iter().find(|column| column.token as usize >= vocabulary) {
            return refused(format!("token {} is not in the vocabulary of {vocabulary}", column.token));
        }
        self.next.fill(None);
        for column in columns {
            let sequence = column.sequence.0 as usize;
            let Some(filled) = self.filled.get(sequence) else {
                return refused(format!("sequence {sequence}, and there are {}", self.filled.len()));
            };
            let (position, next) = (column.position, &mut self.next[sequence]);
            if next.map_or(position > *filled, |next| position != next) {
                let held = next.unwrap_or(*filled);
                return refused(format!("position {position} does not follow the {held} in the cache"));
            }
            if position >= self.context {
                let mut same = columns.iter().filter(|other| other.sequence == column.sequence);
                let first = same.next().map_or(position, |first| first.position);
                return refused(format!(
                    "{} tokens at position {first} do not fit the context of {}",
                    same.count() + 1,
                    self.context
                ));
            }
            *next = Some(position + 1);
        }
        let outputs = columns.iter().filter(|column| column.output).count();
        if outputs > batch {
            return refused(format!("logits of {outputs} tokens wanted, a batch holds {batch}"));
        }
        if selection == Selection::TopK(0) {
            return refused("the largest 0 logits are none".into());
        }
        Ok(())
    }

    /// A step begins: if it fails, its positions are half written and do not count.
    pub fn begin(&mut self, columns: &[Column]) {
        for column in columns.iter().rev() {
            self.filled[column.sequence.0 as usize] = column.position;
        }
    }

    /// Columns of the step are in the cache.
    pub fn advance(&mut self, columns: &[Column]) {
        for column in columns {
            self.filled[column.sequence.0 as usize] = column.position + 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_logits_come_in_the_stated_order() {
        let logits = [1.0, 3.0, -0.0, 3.0, 0.0, 2.0, /* the next column */ 5.0, 5.0, 5.0, 5.0, 5.0, 5.0];
        let mut selector = Selector::default();
        let mut top = |count| match selector.select(&logits, 6, Selection::TopK(count)) {
            Output::TopK(candidates) => candidates.iter().map(|c| c.token).collect::<Vec<_>>(),
            other => panic!("{other:?}"),
        };
        assert_eq!(top(1), [1, 0]);
        assert_eq!(top(4), [1, 3, 5, 0, 0, 1, 2, 3]);
        assert_eq!(top(9), [1, 3, 5, 0, 4, 2, 0, 1, 2, 3, 4, 5]);
        assert_eq!(selector.select(&logits, 6, Selection::Greedy), Output::Greedy(&[1, 0]));
    }

    #[test]
    fn columns_split_into_runs() {
        use Wanted::{All, Last, Nothing};
        let columns: Vec<Column> = [
            Column::of(SequenceId(0), &[1, 2, 3], 4, Last).collect::<Vec<_>>(),
            Column::of(SequenceId(0), &[1, 2], 7, All).collect(),
            Column::of(SequenceId(0), &[1, 2], 9, Nothing).collect(),
            Column::of(SequenceId(1), &[1], 11, Last).collect(),
            Column::of(SequenceId(1), &[1], 2, Nothing).collect(),
        ]
        .concat();
        let runs = |most| {
            let (mut rest, mut runs) = (&columns[..], Vec::new());
            while !rest.is_empty() {
                let (count, wanted) = Column::leading_run(rest, most);
                runs.push((count, wanted));
                rest = &rest[count..];
            }
            runs
        };
        assert_eq!(runs(9), [(3, Last), (2, All), (2, Nothing), (1, Last), (1, Nothing)]);
        let halves = [(2, Nothing), (2, All), (1, Last), (2, Nothing), (1, Last), (1, Nothing)];
        assert_eq!(runs(2), halves);
    }
}
