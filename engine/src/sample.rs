//! From logits to the next token, with the same bits for the same seed on every machine.

use std::collections::HashSet;

use kiln_kernels::{Host, math};

use crate::rng::SplitMix64;

/// How tokens are chosen; the defaults are llama.cpp's.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Settings {
    /// Divides the logits; 0 or less takes the best token always.
    pub temperature: f32,
    /// Keeps this many of the best tokens; 0 keeps all.
    pub top_k: usize,
    /// Keeps the best tokens that together have this probability; 1 keeps all.
    pub top_p: f32,
    /// Keeps tokens that have at least this share of the best one's probability; 0 keeps all.
    pub min_p: f32,
    /// Divides positive and multiplies negative logits of recent tokens; 1 does nothing.
    pub repeat_penalty: f32,
    /// How many tokens count as recent.
    pub repeat_last: usize,
    /// Where the random numbers start.
    pub seed: u64,
}

impl Default for Settings {
    fn default() -> Settings {
        Settings {
            temperature: 0.8,
            top_k: 40,
            top_p: 0.95,
            min_p: 0.05,
            repeat_penalty: 1.0,
            repeat_last: 64,
            seed: 0,
        }
    }
}

/// Chooses tokens.
#[derive(Debug)]
pub struct Sampler {
    settings: Settings,
    rng: SplitMix64,
    candidates: Vec<(f32, u32)>,
    penalised: HashSet<u32>,
}

impl Sampler {
    /// A sampler that starts at the settings' seed.
    pub fn new(settings: Settings) -> Sampler {
        Sampler {
            rng: SplitMix64::new(settings.seed),
            settings,
            candidates: Vec::new(),
            penalised: HashSet::new(),
        }
    }

    /// Whether the next token is always [`best`] of the logits, so that nobody need look at the others.
    pub fn is_greedy(&self) -> bool {
        self.settings.temperature <= 0.0 && self.settings.repeat_penalty == 1.0
    }

    /// The next token after `recent`, of a vocabulary of `logits.len()`, which must not be empty.
    ///
    /// Steps as in llama.cpp: penalty, top-k, top-p, min-p, temperature. Tokens of equal logits count by their number.
    pub fn sample(&mut self, logits: &[f32], recent: &[u32]) -> u32 {
        let Settings { temperature, top_k, top_p, min_p, .. } = self.settings;
        if self.is_greedy() {
            return best(logits);
        }
        self.candidates.clear();
        self.candidates.extend(logits.iter().zip(0..).map(|(logit, token)| (*logit, token)));
        self.penalise(recent);
        let order = |a: &(f32, u32), b: &(f32, u32)| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1));
        if temperature <= 0.0 {
            return self.candidates.iter().min_by(|a, b| order(a, b)).map_or(0, |best| best.1);
        }
        if top_k > 0 && top_k < self.candidates.len() {
            self.candidates.select_nth_unstable_by(top_k - 1, order);
            self.candidates.truncate(top_k);
        }
        self.candidates.sort_unstable_by(order);
        let best = self.candidates[0].0;
        if top_p < 1.0 {
            let total: f64 = self.candidates.iter().map(|(logit, _)| weight(logit - best)).sum();
            let mut sum = 0.0;
            let enough = self.candidates.iter().position(|(logit, _)| {
                sum += weight(logit - best);
                sum >= f64::from(top_p) * total
            });
            self.candidates.truncate(enough.map_or(self.candidates.len(), |last| last + 1));
        }
        if min_p > 0.0 {
            let kept =
                self.candidates.iter().take_while(|(logit, _)| weight(logit - best) >= f64::from(min_p));
            let kept = kept.count().max(1);
            self.candidates.truncate(kept);
        }
        let scaled = |logit: f32| weight((logit - best) / temperature);
        let total: f64 = self.candidates.iter().map(|(logit, _)| scaled(*logit)).sum();
        // 53 random bits: uniform in [0, 1).
        let mut left = (self.rng.bits() >> 11) as f64 / (1u64 << 53) as f64 * total;
        for (logit, token) in &self.candidates {
            left -= scaled(*logit);
            if left < 0.0 {
                return *token;
            }
        }
        self.candidates[self.candidates.len() - 1].1
    }

    fn penalise(&mut self, recent: &[u32]) {
        let penalty = self.settings.repeat_penalty;
        if penalty == 1.0 {
            return;
        }
        let recent = &recent[recent.len().saturating_sub(self.settings.repeat_last)..];
        self.penalised.clear();
        for token in recent {
            if !self.penalised.insert(*token) {
                continue;
            }
            if let Some((logit, _)) = self.candidates.get_mut(*token as usize) {
                *logit = if *logit > 0.0 { *logit / penalty } else { *logit * penalty };
            }
        }
    }
}

/// The token of the largest logit: +0 is above -0, and of equal logits the first one counts. 0 if there are none.
pub fn best(logits: &[f32]) -> u32 {
    math::argmax(logits) as u32
}

fn weight(difference: f32) -> f64 {
    // The kernels' own exponential: a platform's would give other last bits.
    f64::from(math::exp(Host, difference))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(settings: Settings, logits: &[f32]) -> Vec<usize> {
        let mut sampler = Sampler::new(settings);
        let mut counts = vec![0; logits.len()];
        for _ in 0..4000 {
            counts[sampler.sample(logits, &[]) as usize] += 1;
        }
        counts
    }

    const ALL: Settings = Settings {
        temperature: 1.0,
        top_k: 0,
        top_p: 1.0,
        min_p: 0.0,
        repeat_penalty: 1.0,
        repeat_last: 64,
        seed: 5,
    };

    #[test]
    fn frequencies_follow_the_probabilities() {
        let logits = [1.0f32, 2.0, 0.0].map(|n: f32| (n + 1.0).ln());
        let counts = counts(ALL, &logits);
        for (count, share) in counts.iter().zip([2.0, 3.0, 1.0]) {
            assert!((*count as f64 / 4000.0 - share / 6.0).abs() < 0.03, "{counts:?}");
        }
    }

    #[test]
    fn each_limit_keeps_the_best() {
        let logits = [0.0, 3.0, 2.0, -9.0];
        assert_eq!(counts(Settings { top_k: 2, ..ALL }, &logits)[..1], [0]);
        assert_eq!(counts(Settings { top_p: 0.5, ..ALL }, &logits)[1], 4000);
        assert_eq!(counts(Settings { min_p: 0.9, ..ALL }, &logits)[1], 4000);
        assert_eq!(counts(Settings { temperature: 0.0, ..ALL }, &[1.0, 1.0])[0], 4000);
    }

    #[test]
    fn a_seed_gives_the_same_tokens_and_another_gives_others() {
        let logits: Vec<f32> = (0..1000).map(|i| ((i * 37 % 101) as f32) / 20.0).collect();
        let run = |seed| {
            let mut sampler = Sampler::new(Settings { seed, ..Settings::default() });
            (0..20).map(|_| sampler.sample(&logits, &[])).collect::<Vec<_>>()
        };
        assert_eq!(run(1), run(1));
        assert_ne!(run(1), run(2));
        // Recorded: must never change on any machine.
        assert_eq!(run(7)[..6], RECORDED);
    }
    const RECORDED: [u32; 6] = [363, 30, 322, 191, 666, 838];

    #[test]
    fn the_best_token_is_the_one_that_sorting_puts_first() {
        let mut rng = SplitMix64::new(11);
        for round in 0..500 {
            // Few different values, so that there are ties, zeros of both signs among them.
            let logits: Vec<f32> = (0..97)
                .map(|_| [0.0, -0.0, 1.5, -2.0, f32::MIN_POSITIVE, 1.5, -1e-40][(rng.bits() % 7) as usize])
                .map(|logit| if round % 3 == 0 { -f32::abs(logit) } else { logit })
                .collect();
            let mut order: Vec<u32> = (0..97).collect();
            order.sort_by(|a, b| logits[*b as usize].total_cmp(&logits[*a as usize]));
            assert_eq!(best(&logits), order[0], "{logits:?}");
            // The way through penalties agrees where there is nothing to penalise.
            let greedy = Settings { temperature: 0.0, ..ALL };
            assert_eq!(Sampler::new(greedy).sample(&logits, &[3, 4]), order[0]);
            let penalty = Settings { repeat_penalty: 2.0, ..greedy };
            assert_eq!(Sampler::new(penalty).sample(&logits, &[]), order[0]);
        }
        assert_eq!(best(&[]), 0);
    }

    #[test]
    fn only_greedy_sampling_without_a_penalty_takes_the_best() {
        let takes = |temperature, repeat_penalty| {
            Sampler::new(Settings { temperature, repeat_penalty, ..ALL }).is_greedy()
        };
        assert!(takes(0.0, 1.0) && takes(-1.0, 1.0));
        assert!(!takes(0.0, 1.1) && !takes(0.8, 1.0) && !takes(f32::NAN, 1.0));
    }

    #[test]
    fn a_penalty_takes_time_in_proportion_to_its_window() {
        let recent: Vec<u32> = (0..200_000).collect();
        let settings = Settings { temperature: 0.0, repeat_penalty: 2.0, repeat_last: recent.len(), ..ALL };
        let started = std::time::Instant::now();
        assert_eq!(Sampler::new(settings).sample(&vec![1.0; recent.len() + 1], &recent), 200_000);
        // In proportion to its square: many seconds.
        assert!(started.elapsed() < std::time::Duration::from_secs(2));
    }

    #[test]
    fn a_penalty_lowers_recent_tokens_once() {
        let settings = Settings { temperature: 0.0, repeat_penalty: 2.0, ..ALL };
        assert_eq!(Sampler::new(settings).sample(&[1.5, 1.0], &[0, 0]), 1);
        assert_eq!(Sampler::new(settings).sample(&[-1.0, -1.5], &[0]), 1);
        assert_eq!(Sampler::new(settings).sample(&[2.1, 1.0], &[0, 0]), 0);
    }
}
