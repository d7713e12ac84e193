//! What a resolver decided, as data: every candidate with its verdict, the choice, why, and how to change it.
//!
//! `setup` and `build` act on a decision's value, `doctor` prints the decision itself, so they cannot disagree.
//! Left out: how a decision is laid out as text (that is `doctor`'s).

use std::fmt;

use serde::{Serialize, Serializer};

use crate::report::error::{Code, Error, Exit, Result};

/// One decision of a resolver.
///
/// Its serialized form is part of doctor's versioned JSON: keys are only ever added.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Decision {
    /// What is decided about, a stable word such as `llc`.
    pub subject: &'static str,
    /// What was chosen, as one line; `None` when nothing qualifies.
    pub chosen: Option<String>,
    /// Why this one, or why none, as one sentence without a trailing period.
    pub why: String,
    /// Everything that was looked at, in order of precedence.
    pub candidates: Vec<Candidate>,
    /// The command or setting that changes or mends the choice.
    pub change: Option<String>,
    /// Further facts worth a line each, such as warnings that do not stop a build.
    pub notes: Vec<String>,
    /// Why a build would not start; `None` when it would.
    pub problem: Option<Problem>,
}

impl Decision {
    /// A decision about `subject` that has not chosen anything yet.
    pub fn new(subject: &'static str) -> Self {
        Decision {
            subject,
            chosen: None,
            why: String::new(),
            candidates: Vec::new(),
            change: None,
            notes: Vec::new(),
            problem: None,
        }
    }

    /// Says whether a build can rely on it.
    pub fn is_good(&self) -> bool {
        self.problem.is_none()
    }

    /// Records a candidate.
    pub fn consider(&mut self, what: impl fmt::Display, from: impl Into<String>, verdict: Verdict) {
        self.candidates.push(Candidate { what: what.to_string(), from: from.into(), verdict });
    }
}

/// One thing that was looked at.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Candidate {
    /// The thing, usually an absolute path.
    pub what: String,
    /// Where it was found: `CUDA_OXIDE_LLC`, `PATH`, ...
    pub from: String,
    /// What became of it.
    #[serde(flatten)]
    pub verdict: Verdict,
}

/// What became of a candidate; serialized as `verdict` and, where there is one, `reason`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "verdict", content = "reason", rename_all = "snake_case")]
pub enum Verdict {
    /// It is the one.
    Chosen,
    /// It was examined and does not qualify, or a better one was found; the reason.
    Rejected(String),
    /// It was not examined; the reason.
    NotTried(String),
}

/// How much a resolver looks at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Thoroughness {
    /// Stop at the first candidate that nothing can beat. The choice is the same as with `All`.
    First,
    /// Examine every candidate, for `doctor`.
    All,
}

/// Why a decision stops a build: an [`Error`] that can be kept, cloned and printed as JSON.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Problem {
    /// The kind of failure, serialized as its identifier.
    #[serde(serialize_with = "code_id")]
    pub code: &'static Code,
    /// What the process exits with.
    #[serde(serialize_with = "exit_status")]
    pub exit: Exit,
    /// What was found, what was expected, and where.
    pub message: String,
    /// Underlying causes, outermost first.
    pub causes: Vec<String>,
    /// The command or change that mends it.
    pub hint: Option<String>,
}

impl From<Error> for Problem {
    fn from(error: Error) -> Self {
        Problem {
            code: error.code(),
            exit: error.exit(),
            message: error.message().to_owned(),
            causes: error.causes().to_vec(),
            hint: error.hint_text().map(str::to_owned),
        }
    }
}

impl From<Problem> for Error {
    fn from(problem: Problem) -> Self {
        let mut error = Error::new(problem.code, problem.message).with_exit(problem.exit);
        for cause in problem.causes {
            error = error.cause(cause);
        }
        match problem.hint {
            Some(hint) => error.hint(hint),
            None => error,
        }
    }
}

/// A decision together with the typed value that `setup` and `build` go on with.
#[derive(Clone, Debug)]
pub struct Resolved<T> {
    /// What was considered, chosen, and why.
    pub decision: Decision,
    /// The choice; `None` exactly when nothing qualifies.
    pub value: Option<T>,
}

impl<T> Resolved<T> {
    /// The value, when a build can rely on it.
    ///
    /// # Errors
    /// The decision's problem.
    pub fn require(&self) -> Result<&T> {
        match (&self.value, &self.decision.problem) {
            (_, Some(problem)) => Err(problem.clone().into()),
            (Some(value), None) => Ok(value),
            (None, None) => Err(Error::new(
                &crate::report::error::BUG,
                format!("nothing was chosen for {}, and no reason was recorded", self.decision.subject),
            )),
        }
    }
}

fn code_id<S: Serializer>(code: &&'static Code, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(code.id)
}

fn exit_status<S: Serializer>(exit: &Exit, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_u8(exit.status())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_keys_are_stable() {
        let mut decision = Decision::new("llc");
        decision.why = "none".into();
        decision.consider("/usr/bin/llc", "PATH", Verdict::Rejected("is LLVM 14".into()));
        decision.consider("/usr/bin/llc-22", "PATH", Verdict::Chosen);
        decision.problem = Some(Error::new(&crate::report::error::ACCESS, "m").cause("c").hint("h").into());
        let json = serde_json::to_value(&decision).unwrap();
        assert_eq!(
            json,
            serde_json::json!({
                "subject": "llc",
                "chosen": null,
                "why": "none",
                "candidates": [
                    {"what": "/usr/bin/llc", "from": "PATH", "verdict": "rejected", "reason": "is LLVM 14"},
                    {"what": "/usr/bin/llc-22", "from": "PATH", "verdict": "chosen"},
                ],
                "change": null,
                "notes": [],
                "problem": {"code": "KILN-0102", "exit": 1, "message": "m", "causes": ["c"], "hint": "h"},
            })
        );
    }

    #[test]
    fn a_problem_survives_the_way_through_an_error() {
        let problem: Problem = Error::new(&crate::report::error::IO, "m").cause("c").hint("h").into();
        assert_eq!(Problem::from(Error::from(problem.clone())), problem);
    }

    #[test]
    fn a_value_with_a_problem_is_not_handed_out() {
        let mut decision = Decision::new("llc");
        decision.problem = Some(Error::new(&crate::report::error::ACCESS, "m").into());
        let resolved = Resolved { decision, value: Some(1) };
        assert_eq!(resolved.require().unwrap_err().message(), "m");
    }
}
