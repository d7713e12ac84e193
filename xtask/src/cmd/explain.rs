//! `explain CODE`: what an error means, from the same source as the error.

use clap::Args;
use serde::Serialize;

use crate::report::error::{Code, Error, Exit, Result};
use crate::report::output;

crate::codes! {
    UNKNOWN = "KILN-0120", Machine, "no such error code",
        "Every error prints its code in brackets, `error[KILN-0101]`. `cargo xtask explain` without a code lists them \
         all.";
}

/// Every error code of the product, in order.
pub fn all_codes() -> Vec<&'static Code> {
    let modules = [
        crate::machine::arch::CODES,
        crate::source::archive::CODES,
        crate::backend::CODES,
        crate::source::bundle::CODES,
        crate::machine::cargo_config::CODES,
        crate::machine::child::CODES,
        crate::backend::checkout::CODES,
        crate::cmd::cli::CODES,
        crate::machine::cuda::CODES,
        crate::source::cuda_wheels::CODES,
        crate::source::download::CODES,
        crate::report::error::CODES,
        crate::backend::host_config::CODES,
        crate::machine::llc::CODES,
        crate::base::lock::CODES,
        crate::source::model::CODES,
        crate::source::nar::CODES,
        crate::machine::nvvm::CODES,
        crate::machine::nvvm::ir::CODES,
        crate::source::patch::CODES,
        crate::pins::CODES,
        crate::plan::CODES,
        crate::machine::probe::CODES,
        crate::ptx::CODES,
        crate::ptx::driver::CODES,
        crate::ptx::record::CODES,
        crate::ptx::scan::CODES,
        crate::ptx::table::CODES,
        crate::ptx::usage::CODES,
        crate::repin::CODES,
        crate::store::roots::CODES,
        crate::store::selection::CODES,
        crate::source::CODES,
        crate::store::CODES,
        crate::machine::toolchain::CODES,
        crate::source::vendor::CODES,
        crate::base::env::CODES,
        crate::store::record::CODES,
        crate::build::bless::CODES,
        crate::build::cpu::CODES,
        crate::build::gpu::CODES,
        crate::build::recorded::CODES,
        super::gate::CODES,
        super::model::CODES,
        crate::verify::CODES,
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

    /// Print docs/errors.md: all codes with their explanations
    #[arg(long, conflicts_with = "code")]
    markdown: bool,

    /// Print one JSON document (schema kiln.explain/1, described in docs/reference.md)
    #[arg(long, conflicts_with = "markdown")]
    json: bool,
}

#[derive(Serialize)]
struct Report {
    schema: &'static str,
    codes: Vec<Explained>,
}

#[derive(Serialize)]
struct Explained {
    code: &'static str,
    exit: u8,
    title: &'static str,
    explanation: &'static str,
}

impl Report {
    fn of<'a>(codes: impl IntoIterator<Item = &'a &'static Code>) -> Self {
        let codes = codes.into_iter().map(|code| Explained {
            code: code.id,
            exit: code.exit.status(),
            title: code.title,
            explanation: code.explanation,
        });
        Report { schema: "kiln.explain/1", codes: codes.collect() }
    }
}

impl Explain {
    /// Prints the explanation.
    ///
    /// # Errors
    /// There is no such code.
    pub fn run(self) -> Result<u8> {
        let codes = all_codes();
        if self.markdown {
            output::line(markdown(&codes).trim_end())?;
            return Ok(0);
        }
        let Some(asked) = self.code else {
            if self.json {
                output::json(&Report::of(&codes))?;
                return Ok(0);
            }
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
        if self.json {
            output::json(&Report::of([&code]))?;
            return Ok(0);
        }
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

/// The page of all codes.
pub fn markdown(codes: &[&Code]) -> String {
    let mut text = String::from(
        "<!-- Made from the source: cargo xtask explain --markdown > docs/errors.md -->\n\n# Error codes\n\n\
         Every error prints its code, what was found and expected, and a hint. `cargo xtask explain CODE` prints the same \
         text as this page.\n",
    );
    for code in codes {
        text.push_str(&format!(
            "\n## {}: {}\n\n{}\n\nExit code: {}\n",
            code.id,
            code.title,
            code.explanation,
            meaning(code.exit)
        ));
    }
    text
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
    fn the_committed_page_is_what_the_source_says() {
        let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/errors.md");
        let committed = fs_err::read_to_string(page).unwrap_or_default();
        assert!(
            committed == markdown(&all_codes()),
            "docs/errors.md is not up to date; run: cargo xtask explain --markdown > docs/errors.md"
        );
    }

    #[test]
    fn every_module_that_declares_codes_is_listed() {
        let mut folders = vec![std::path::PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/src"))];
        let listed: Vec<_> = all_codes().iter().map(|code| code.id).collect();
        while let Some(folder) = folders.pop() {
            for entry in fs_err::read_dir(folder).unwrap() {
                let path = entry.unwrap().path();
                if path.is_dir() {
                    folders.push(path);
                    continue;
                }
                let text = fs_err::read_to_string(&path).unwrap_or_default();
                for line in text.lines().filter(|line| line.starts_with("    ")) {
                    let declared = line.split_once(" = \"KILN-").filter(|(name, _)| {
                        name.trim_start().bytes().all(|byte| byte.is_ascii_uppercase() || byte == b'_')
                    });
                    let Some((_, rest)) = declared else { continue };
                    let id = format!("KILN-{}", &rest[..4]);
                    assert!(listed.contains(&id.as_str()), "{id} of {} is not in all_codes", path.display());
                }
            }
        }
    }

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
            assert!(code.explanation.len() > 60, "{}: too short to say why and how to mend it", code.id);
        }
    }
}
