//! Conversations as the model wants them written: the template that a file carries.

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Serde, Value};
use minijinja::{Environment, ErrorKind, UndefinedBehavior};
use serde::Serialize;

use crate::error::{Error, Result};
use crate::gguf::Gguf;
use crate::tokenizer::Tokenizer;

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
        let name = |token: Option<u32>| token.map_or("", |token| tokenizer.text(token)).to_string();
        Template::compile(source, name(tokenizer.bos()), name(tokenizer.eos()))
    }

    fn compile(source: &str, begin: String, end: String) -> Result<Template> {
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        environment.set_syntax(syntax.map_err(describe)?);
        environment.set_undefined_behavior(UndefinedBehavior::Lenient);
        environment.set_fuel(Some(FUEL));
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_function("raise_exception", |message: String| -> std::result::Result<(), _> {
            Err(minijinja::Error::new(ErrorKind::InvalidOperation, message))
        });
        environment.add_template_owned("chat", source.to_string()).map_err(describe)?;
        Ok(Template { environment, begin, end })
    }

    /// Writes a conversation; with `answer`, up to where the assistant's answer begins.
    ///
    /// # Errors
    /// [`Error::Template`] if the template refuses the conversation or uses what is not supported.
    pub fn render(&self, messages: &[Message], answer: bool) -> Result<String> {
        let template = self.environment.get_template("chat").map_err(describe)?;
        let context = minijinja::context! {
            messages => Value::from(Serde(messages)),
            add_generation_prompt => answer,
            bos_token => self.begin.as_str(),
            eos_token => self.end.as_str(),
        };
        template.render(context).map_err(describe)
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
        let text = compile(source).and_then(|template| template.render(&user(" hi "), true));
        assert_eq!(text.ok().as_deref(), Some("<s>\n[HI]\nA:"));
    }

    #[test]
    fn what_a_template_cannot_do_is_an_error_that_says_where() {
        let message = |source: &str| {
            let result = compile(source).and_then(|template| template.render(&user("x"), false));
            result.err().map(|error| error.to_string()).unwrap_or_default()
        };
        assert!(message("{% if %}").starts_with("chat template: syntax error"), "{}", message("{% if %}"));
        assert!(message("\n{{ messages | frobnicate }}").contains("frobnicate"));
        assert!(message("{{ raise_exception('only pairs') }}").contains("only pairs"));
        assert!(
            message("{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}")
                .contains("fuel")
        );
    }
}
