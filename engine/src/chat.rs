//! Conversations as the model wants them written: the template that a file carries.
//!
//! Templates are Jinja as transformers sets it up; the same conversation gives the same text, byte for byte.

mod python;
mod source;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Serde, Value};
use minijinja::{Environment, ErrorKind, UndefinedBehavior};
use serde::Serialize;
use serde_json::{Map, json};

use crate::error::{Error, Result};
use crate::gguf::Gguf;
use crate::tokenizer::Tokenizer;

pub use python::Date;

/// Instructions that a template may take: far more than any real one needs, and an end to one that loops.
const FUEL: u64 = 10_000_000;

/// One message.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Message {
    /// `system`, `user` or `assistant`.
    pub role: &'static str,
    /// What was said.
    pub content: String,
}

/// What a template is given beside the conversation. Fields that are `None` are not defined in the template.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// The descriptions of functions that the model may call.
    pub tools: Option<serde_json::Value>,
    /// The date that the template is told; now, without one.
    pub date: Option<Date>,
    /// Further names, such as `enable_thinking`.
    pub variables: Map<String, serde_json::Value>,
}

/// A compiled template.
#[derive(Debug)]
pub struct Template {
    environment: Environment<'static>,
    begin: String,
    end: String,
}

impl Template {
    /// Compiles the template of a file.
    ///
    /// # Errors
    /// [`Error::Template`] if there is none or it does not parse.
    pub fn from_gguf(file: &Gguf, tokenizer: &Tokenizer) -> Result<Template> {
        let source = file.string("tokenizer.chat_template")?.ok_or_else(|| {
            Error::Template(format!("{} has none: it is not a chat model; use `kiln run`", file.name()))
        })?;
        Template::with_source(source, tokenizer)
    }

    /// Compiles another template than that of the tokenizer's file.
    ///
    /// # Errors
    /// [`Error::Template`] if it does not parse.
    pub fn with_source(source: &str, tokenizer: &Tokenizer) -> Result<Template> {
        let name = |token: Option<u32>| token.map_or("", |token| tokenizer.text(token)).to_string();
        Template::compile(source, name(tokenizer.bos()), name(tokenizer.eos()))
    }

    /// Compiles a template; `begin` and `end` are its `bos_token` and `eos_token`.
    ///
    /// # Errors
    /// [`Error::Template`] if it does not parse.
    pub fn compile(source: &str, begin: String, end: String) -> Result<Template> {
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        environment.set_syntax(syntax.map_err(describe)?);
        environment.set_undefined_behavior(UndefinedBehavior::Lenient);
        environment.set_fuel(Some(FUEL));
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        python::add_to(&mut environment);
        environment.add_function("raise_exception", |message: String| -> std::result::Result<(), _> {
            Err(minijinja::Error::new(ErrorKind::InvalidOperation, message))
        });
        environment.add_template_owned("chat", source::adapt(source)).map_err(describe)?;
        Ok(Template { environment, begin, end })
    }

    /// Writes a conversation; with `answer`, up to where the assistant's answer begins.
    ///
    /// # Errors
    /// [`Error::Template`] if the template refuses the conversation or uses what is not supported.
    pub fn render(&self, messages: &[Message], answer: bool, options: &Options) -> Result<String> {
        let mut variables = Map::new();
        variables.insert("messages".into(), json!(messages));
        variables.insert("tools".into(), options.tools.clone().unwrap_or_default());
        variables.insert("documents".into(), serde_json::Value::Null);
        variables.insert("add_generation_prompt".into(), answer.into());
        variables.extend(options.variables.clone());
        self.render_variables(variables, options.date)
    }

    /// Renders the template with these names alone, beside `bos_token`, `eos_token` and the date.
    ///
    /// # Errors
    /// As [`Self::render`].
    pub fn render_variables(
        &self,
        mut variables: Map<String, serde_json::Value>,
        date: Option<Date>,
    ) -> Result<String> {
        for (name, value) in [("bos_token", &self.begin), ("eos_token", &self.end)] {
            variables.entry(name).or_insert_with(|| value.as_str().into());
        }
        let mut environment = self.environment.clone();
        let date = date.unwrap_or_else(Date::now);
        environment.add_function("strftime_now", move |format: String| date.format(&format));
        let template = environment.get_template("chat").map_err(describe)?;
        template.render(Value::from(Serde(variables))).map_err(describe)
    }
}

fn describe(error: minijinja::Error) -> Error {
    let line = error.line().map_or(String::new(), |line| format!(", line {line}"));
    let detail = error.detail().map_or(String::new(), |detail| format!(": {detail}"));
    Error::Template(format!("{}{detail}{line}", error.kind()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn user(text: &str) -> Vec<Message> {
        vec![Message { role: "user", content: text.into() }]
    }

    fn compile(source: &str) -> Result<Template> {
        Template::compile(source, "<s>".into(), "</s>".into())
    }

    #[test]
    fn python_methods_and_block_trimming_work_as_in_transformers() {
        let source = "{{ bos_token }}\n{% for m in messages %}\n  {% if m['role'] == 'user' %}\n[{{ m.content.strip() | upper }}]\n  {% endif %}\n{% endfor %}\n{% if add_generation_prompt %}A:{% endif %}";
        let text =
            compile(source).and_then(|template| template.render(&user(" hi "), true, &Options::default()));
        assert_eq!(text.ok().as_deref(), Some("<s>\n[HI]\nA:"));
    }

    #[test]
    fn what_a_template_cannot_do_is_an_error_that_says_where() {
        let message = |source: &str| {
            let result =
                compile(source).and_then(|template| template.render(&user("x"), false, &Options::default()));
            result.err().map(|error| error.to_string()).unwrap_or_default()
        };
        assert!(message("{% if %}").starts_with("chat template: syntax error"), "{}", message("{% if %}"));
        assert!(message("\n{{ messages | frobnicate }}").contains("frobnicate"));
        assert!(message("{{ '%d' % 3 }}").contains("% operator"), "{}", message("{{ '%d' % 3 }}"));
        assert!(message("{{ 'a'|safe + 'b' }}").contains("marked safe is joined"));
        assert!(message("{{ [1e22] }}").contains("the number 1e+22"));
        assert!(message("{{ messages | map(attribute='role') | tojson }}").contains("kind iterator"));
        assert!(message("{{ raise_exception('only pairs') }}").contains("only pairs"));
        assert!(
            message("{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}")
                .contains("fuel")
        );
    }
}
