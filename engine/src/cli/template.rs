//! The flags about chat templates, and `kiln apply-template`, which renders a conversation without a model.

use std::io::{Read, Write};
use std::path::PathBuf;

use clap::Args;
use serde_json::{Map, Value};

use super::Failure;
use super::load::{FileArguments, read_text};
use crate::chat::{Date, Options, Template};
use crate::error::{Error, Result};
use crate::gguf::Gguf;
use crate::tokenizer::Tokenizer;

/// Which template, and what it is told.
#[derive(Debug, Args)]
pub(super) struct TemplateArguments {
    /// A Jinja template to use instead of the file's.
    #[arg(long, value_name = "FILE")]
    chat_template_file: Option<PathBuf>,
    /// Further names that the template is given, as a JSON object: {"enable_thinking": false}.
    #[arg(long, value_name = "JSON")]
    chat_template_kwargs: Option<String>,
    /// A JSON file with the list of functions that the model may call.
    #[arg(long, value_name = "FILE")]
    tools: Option<PathBuf>,
    /// Ask a model that can think to answer at once: enable_thinking is false in the template.
    #[arg(long)]
    no_thinking: bool,
    /// The date that the template is told, as 2026-12-31 or 2026-12-31T10:30:00. Default: now, in UTC.
    #[arg(long, value_name = "DATE", value_parser = date)]
    date: Option<Date>,
}

fn date(text: &str) -> std::result::Result<Date, String> {
    Date::parse(text).ok_or_else(|| "expected YYYY-MM-DD or YYYY-MM-DDTHH:MM:SS".into())
}

impl TemplateArguments {
    pub fn compile(&self, file: &Gguf, tokenizer: &Tokenizer) -> Result<Template> {
        match &self.chat_template_file {
            Some(path) => Template::with_source(&read_text(path)?, tokenizer),
            None => Template::from_gguf(file, tokenizer),
        }
    }

    pub fn options(&self) -> Result<Options> {
        let mut variables = match &self.chat_template_kwargs {
            Some(text) => object(text, "--chat-template-kwargs")?,
            None => Map::new(),
        };
        if self.no_thinking {
            variables.insert("enable_thinking".into(), false.into());
        }
        let tools = match &self.tools {
            Some(path) => match parse(&read_text(path)?, "--tools")? {
                tools @ Value::Array(_) => Some(tools),
                _ => return Err(Error::Request(format!("{} holds no list", path.display()))),
            },
            None => None,
        };
        Ok(Options { tools, date: self.date, variables })
    }
}

#[derive(Debug, Args)]
pub(super) struct Arguments {
    #[command(flatten)]
    file: FileArguments,
    #[command(flatten)]
    template: TemplateArguments,
    /// The conversation: a JSON object with `messages` and whatever else the template is to be given. Default: stdin.
    #[arg(short, long, value_name = "FILE")]
    conversation: Option<PathBuf>,
}

/// Prints exactly what the template writes: no line end is added.
pub(super) fn apply(arguments: &Arguments, out: &mut dyn Write) -> std::result::Result<(), Failure> {
    let text = match &arguments.conversation {
        Some(path) => read_text(path)?,
        None => read_stdin()?,
    };
    let mut variables = object(&text, "the conversation")?;
    let options = arguments.template.options()?;
    variables.extend(options.variables);
    variables.extend(options.tools.map(|tools| ("tools".into(), tools)));
    // Without a model a template stands alone: its names for the begin and the end come with the conversation.
    let template = match (&arguments.file.model, &arguments.template.chat_template_file) {
        (None, Some(path)) => Template::compile(&read_text(path)?, String::new(), String::new())?,
        (None, None) => {
            let problem = "no template: give a model with -m or a template with --chat-template-file";
            return Err(Error::Request(problem.into()).into());
        }
        (Some(_), _) => {
            let file = arguments.file.open()?;
            arguments.template.compile(&file, &Tokenizer::from_gguf(&file)?)?
        }
    };
    write!(out, "{}", template.render_variables(variables, options.date)?)?;
    Ok(())
}

/// Reads standard input, which must be UTF-8.
pub(super) fn read_stdin() -> Result<String> {
    let mut bytes = Vec::new();
    std::io::stdin().lock().read_to_end(&mut bytes).map_err(Error::io("read", "standard input"))?;
    String::from_utf8(bytes).map_err(|error| {
        Error::Request(format!("standard input is not UTF-8 at byte {}", error.utf8_error().valid_up_to()))
    })
}

fn parse(text: &str, what: &str) -> Result<Value> {
    serde_json::from_str(text).map_err(|error| Error::Request(format!("{what}: {error}")))
}

fn object(text: &str, what: &str) -> Result<Map<String, Value>> {
    match parse(text, what)? {
        Value::Object(object) => Ok(object),
        _ => Err(Error::Request(format!("{what} is not a JSON object"))),
    }
}
