//! `explain CODE`: what an error means, from the same source as the error.

use clap::Args;

use crate::error::{Code, Error, Exit, Result};
use crate::output;

crate::codes! {
    UNKNOWN = "KILN-0120", Machine, "no such error code",
        "Every error prints its code in brackets, `error[KILN-0101]`. `cargo xtask explain` without a code lists them \
         all.";
}

/// Every error code of the product, in order.
pub fn all_codes() -> Vec<&'static Code> {
    let modules = [
        crate::arch::CODES,
        crate::archive::CODES,
        crate::backend::CODES,
        crate::bundle::CODES,
        crate::cargo_config::CODES,
        crate::child::CODES,
        crate::cuda::CODES,
        crate::cuda_wheels::CODES,
        crate::download::CODES,
        crate::error::CODES,
        crate::host_config::CODES,
        crate::llc::CODES,
        crate::nar::CODES,
        crate::patch::CODES,
        crate::pin::CODES,
        crate::ptx::CODES,
        crate::repin::CODES,
        crate::roots::CODES,
        crate::selection::CODES,
        crate::source::CODES,
        crate::store::CODES,
        crate::toolchain::CODES,
        crate::vendor::CODES,
        super::build::CODES,
        super::verify::CODES,
        CODES,
    ];
    let mut codes: Vec<_> = modules.into_iter().flatten().copied().collect();
    codes.sort_by_key(|code| code.id);
    codes
}

/// Explain an error code, or list all of them
///
/// Reads and writes nothing.
#[derive(Debug, Args)]
pub struct Explain {
    /// The code, for example KILN-0911 (or 911)
    code: Option<String>,
}

impl Explain {
    /// Prints the explanation.
    ///
    /// # Errors
    /// There is no such code.
    pub fn run(self) -> Result<u8> {
        let codes = all_codes();
        let Some(asked) = self.code else {
            for code in codes {
                output::line(&format!("{}  {}", code.id, code.title))?;
            }
            return Ok(0);
        };
        let digits = asked.trim_start_matches(|c: char| !c.is_ascii_digit());
        let id = format!("KILN-{digits:0>4}");
        let code = codes.into_iter().find(|code| code.id == id).ok_or_else(|| {
            Error::new(&UNKNOWN, format!("there is no error code {asked}")).hint("run: cargo xtask explain")
        })?;
        output::line(&format!(
            "{}: {}\n\n{}\n\nExit code: {}",
            code.id,
            code.title,
            code.explanation,
            meaning(code.exit)
        ))?;
        Ok(0)
    }
}

fn meaning(exit: Exit) -> String {
    let text = match exit {
        Exit::Machine => "you or the machine must change something",
        Exit::Internal => "a bug, or a failure of input or output",
        Exit::Refusal => "something is there and is not what PROVENANCE says",
        Exit::Child(_) => "a child's own",
    };
    format!("{} ({text})", exit.status())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_unique_and_well_formed() {
        let codes = all_codes();
        for pair in codes.windows(2) {
            assert!(pair[0].id < pair[1].id, "{} is there twice", pair[1].id);
        }
        for code in codes {
            let digits = code.id.strip_prefix("KILN-").unwrap();
            assert!(digits.len() == 4 && digits.bytes().all(|byte| byte.is_ascii_digit()), "{}", code.id);
            assert!(!code.title.ends_with('.') && code.explanation.ends_with(['.', '`']), "{}", code.id);
        }
    }
}
