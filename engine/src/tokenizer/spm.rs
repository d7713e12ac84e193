//! SentencePiece vocabularies: BPE by score (model `llama`) and unigram by the best path (model `t5`).

use std::cmp::Ordering;
use std::collections::{BinaryHeap, HashMap};

/// What SentencePiece writes for a space.
pub(super) const SPACE: char = '\u{2581}';

/// A vocabulary with scores.
#[derive(Debug)]
pub(super) struct Spm {
    pub ids: HashMap<String, u32>,
    pub scores: Vec<f32>,
    /// The token of each byte, for text that no piece covers.
    pub bytes: [Option<u32>; 256],
    pub unknown: Option<u32>,
    pub unigram: bool,
    /// Bytes of the longest piece: bounds the search of the unigram path.
    pub longest: usize,
}

impl Spm {
    /// Encodes text whose spaces have been replaced by [`SPACE`].
    pub fn encode(&self, text: &str, out: &mut Vec<u32>) {
        if self.unigram {
            self.encode_unigram(text, out);
        } else {
            self.encode_bpe(text, out);
        }
    }

    fn encode_bpe(&self, text: &str, out: &mut Vec<u32>) {
        const NONE: usize = usize::MAX;
        // A symbol is text[start..end]; a merged one takes over its right neighbour's end.
        let starts: Vec<usize> = text.char_indices().map(|(at, _)| at).collect();
        let count = starts.len();
        let mut ends: Vec<usize> = starts.iter().skip(1).copied().chain([text.len()]).take(count).collect();
        let mut next: Vec<usize> = (1..=count).map(|i| if i < count { i } else { NONE }).collect();
        let mut previous: Vec<usize> = (0..count).map(|i| i.checked_sub(1).unwrap_or(NONE)).collect();
        let mut alive = vec![true; count];
        let mut queue = BinaryHeap::new();
        let candidate = |ends: &[usize], left: usize, right: usize| {
            self.ids.get(&text[starts[left]..ends[right]]).map(|id| Candidate {
                score: self.scores[*id as usize],
                left,
                right,
                middle: ends[left],
                end: ends[right],
            })
        };
        queue.extend((1..count).filter_map(|right| candidate(&ends, right - 1, right)));
        while let Some(Candidate { left, right, middle, end, .. }) = queue.pop() {
            if !alive[left] || !alive[right] || ends[left] != middle || ends[right] != end {
                continue;
            }
            ends[left] = end;
            alive[right] = false;
            next[left] = next[right];
            if next[left] != NONE {
                previous[next[left]] = left;
                queue.extend(candidate(&ends, left, next[left]));
            }
            if previous[left] != NONE {
                queue.extend(candidate(&ends, previous[left], left));
            }
        }
        for symbol in (0..count).filter(|i| alive[*i]) {
            let piece = &text[starts[symbol]..ends[symbol]];
            match self.ids.get(piece) {
                Some(id) => out.push(*id),
                None => self.push_bytes(piece, out),
            }
        }
    }

    fn encode_unigram(&self, text: &str, out: &mut Vec<u32>) {
        // The usual penalty of an unknown character: 10 below the worst piece.
        let worst = self.scores.iter().copied().fold(0.0f32, f32::min);
        let unknown_score = f64::from(worst) - 10.0;
        // best[end] = (score, start, token) of the best path to `end`
        let mut best = vec![(f64::NEG_INFINITY, 0, None); text.len() + 1];
        best[0].0 = 0.0;
        for (start, c) in text.char_indices() {
            let base = best[start].0;
            let mut single = false;
            let mut end = start;
            for c in text[start..].chars() {
                end += c.len_utf8();
                if end - start > self.longest {
                    break;
                }
                if let Some(id) = self.ids.get(&text[start..end]) {
                    let score = base + f64::from(self.scores[*id as usize]);
                    single |= end - start == c.len_utf8();
                    if score > best[end].0 {
                        best[end] = (score, start, Some(*id));
                    }
                }
            }
            let end = start + c.len_utf8();
            if !single && base + unknown_score > best[end].0 {
                best[end] = (base + unknown_score, start, None);
            }
        }
        let mut path = Vec::new();
        let mut end = text.len();
        while end > 0 {
            let (_, start, token) = best[end];
            path.push((start, end, token));
            end = start;
        }
        for (start, end, token) in path.into_iter().rev() {
            match token {
                Some(id) => out.push(id),
                None => self.push_bytes(&text[start..end], out),
            }
        }
    }

    fn push_bytes(&self, piece: &str, out: &mut Vec<u32>) {
        out.extend(piece.bytes().filter_map(|byte| self.bytes[usize::from(byte)].or(self.unknown)));
    }
}

struct Candidate {
    score: f32,
    left: usize,
    right: usize,
    middle: usize,
    end: usize,
}

impl Ord for Candidate {
    fn cmp(&self, other: &Candidate) -> Ordering {
        // Best score first, then leftmost; `total_cmp`, so that a NaN in a file cannot break the queue.
        self.score.total_cmp(&other.score).then_with(|| other.left.cmp(&self.left))
    }
}

impl PartialOrd for Candidate {
    fn partial_cmp(&self, other: &Candidate) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Candidate {
    fn eq(&self, other: &Candidate) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Candidate {}
