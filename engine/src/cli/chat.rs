//! `kiln chat`: a conversation, line by line.

use std::io::{self, BufRead, IsTerminal, Write};
use std::ops::ControlFlow;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use super::load::{LoadArguments, tokenizer_of};
use super::template::TemplateArguments;
use super::{Failure, SamplingArguments, proceed};
use crate::chat::{Date, Message, Options};
use crate::error::Error;
use crate::sample::Sampler;
use crate::selftest::DeviceKind;
use crate::session::{Limits, Session, Stop};
use crate::tokenizer::Tokenizer;

#[derive(Debug, clap::Args)]
pub(super) struct Arguments {
    #[command(flatten)]
    load: LoadArguments,
    #[command(flatten)]
    sampling: SamplingArguments,
    /// Tokens of an answer at most; -1: until the model ends it or the context is full.
    #[arg(short = 'n', long = "predict", default_value_t = -1, allow_negative_numbers = true)]
    predict: i64,
    /// What the model is told before the conversation.
    #[arg(long, alias = "system", value_name = "TEXT")]
    system_prompt: Option<String>,
    /// The first thing to say; without a terminal the only one.
    #[arg(short, long)]
    prompt: Option<String>,
    #[command(flatten)]
    template: TemplateArguments,
}

pub(super) fn chat(
    arguments: &Arguments,
    kinds: &[&dyn DeviceKind],
    out: &mut dyn Write,
) -> Result<(), Failure> {
    let settings = arguments.sampling.settings()?;
    let model = arguments.load.open()?;
    let tokenizer = tokenizer_of(&model)?;
    let template = arguments.template.compile(&model.file, &tokenizer)?;
    let options = arguments.template.options()?;
    let mut session = Session::new(arguments.load.load(model, kinds)?);
    let mut sampler = Sampler::new(settings);
    let limits = Limits { tokens: usize::try_from(arguments.predict).ok(), ignore_end: false };
    let date = options.date.unwrap_or_else(Date::now);
    eprintln!("seed {}, date {date}; an empty line or Ctrl-D ends the conversation", settings.seed);
    // One date for the whole conversation: what was said must not change when midnight passes.
    let options = Options { date: Some(date), ..options };

    let mut messages = Vec::new();
    if let Some(text) = &arguments.system_prompt {
        messages.push(Message { role: "system", content: text.clone() });
    }
    let mut lines = Lines::new(arguments.prompt.clone());
    while let Some(line) = lines.next(out)? {
        messages.push(Message { role: "user", content: line });
        let text = template.render(&messages, true, &options)?;
        let tokens = encode(&tokenizer, &text);
        let room = session.backend().context();
        if tokens.len() >= room {
            let problem = format!("the conversation has {} tokens, the context holds {room}", tokens.len());
            return Err(Error::Request(format!("{problem}: begin anew or raise -c")).into());
        }
        session.set(&tokens, |_| proceed())?;
        let mut answer = String::new();
        let mut written = Ok(());
        let result = session.generate(&tokenizer, &mut sampler, limits, |text| {
            answer.push_str(text);
            written = write!(out, "{text}").and_then(|()| out.flush());
            if written.is_err() { ControlFlow::Break(()) } else { proceed() }
        });
        written?;
        writeln!(out)?;
        out.flush()?;
        if result?.stop == Stop::Context {
            eprintln!("note: the context is full");
        }
        messages.push(Message { role: "assistant", content: answer });
        if proceed().is_break() {
            break;
        }
    }
    Ok(())
}

/// The tokens of a rendered conversation. Templates write the begin token themselves, or leave it to the file's flag.
fn encode(tokenizer: &Tokenizer, text: &str) -> Vec<u32> {
    let writes_begin = tokenizer.bos().is_some_and(|bos| text.starts_with(tokenizer.text(bos)));
    tokenizer.encode(text, !writes_begin, true)
}

/// What the user says, read on a thread of its own so that Ctrl-C is noticed while waiting.
struct Lines {
    first: Option<String>,
    lines: Option<mpsc::Receiver<io::Result<String>>>,
    terminal: bool,
}

impl Lines {
    fn new(first: Option<String>) -> Lines {
        let terminal = io::stdin().is_terminal();
        if first.is_some() && !terminal {
            return Lines { first, lines: None, terminal };
        }
        let (sender, lines) = mpsc::channel();
        thread::spawn(move || {
            for line in io::stdin().lock().lines() {
                if sender.send(line).is_err() {
                    return;
                }
            }
        });
        Lines { first, lines: Some(lines), terminal }
    }

    fn next(&mut self, out: &mut dyn Write) -> Result<Option<String>, Failure> {
        if let Some(first) = self.first.take() {
            return Ok(Some(first));
        }
        let Some(lines) = &self.lines else { return Ok(None) };
        if self.terminal {
            write!(out, "> ")?;
            out.flush()?;
        }
        loop {
            match lines.recv_timeout(Duration::from_millis(50)) {
                Ok(Ok(line)) if line.trim().is_empty() => return Ok(None),
                Ok(Ok(line)) => return Ok(Some(line)),
                Ok(Err(error)) => return Err(Error::io("read", "standard input")(error).into()),
                Err(RecvTimeoutError::Disconnected) => return Ok(None),
                Err(RecvTimeoutError::Timeout) if proceed().is_break() => return Ok(None),
                Err(RecvTimeoutError::Timeout) => {}
            }
        }
    }
}
