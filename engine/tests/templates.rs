//! Chat templates against what jinja2 writes with transformers' settings (`fixtures/templates.json`, by `templates.py`).

use kiln_engine::chat::{Date, Template};
use serde_json::Value;

#[test]
fn templates_are_rendered_as_jinja2_renders_them() {
    let fixture: Value = serde_json::from_str(include_str!("fixtures/templates.json")).expect("JSON");
    let date = fixture["date"].as_str().and_then(Date::parse);
    assert!(date.is_some());
    let mut wrong = Vec::new();
    let cases = fixture["cases"].as_array().expect("cases");
    assert!(cases.len() > 500);
    for case in cases {
        let source = fixture["templates"][case["template"].as_u64().expect("a number") as usize].as_str();
        let conversation = case["conversation"].as_str().expect("a name");
        let variables = fixture["conversations"][conversation].as_object().expect("variables").clone();
        let result = Template::compile(source.expect("a template"), String::new(), String::new())
            .and_then(|template| template.render_variables(variables, date));
        let expected = case["expected"].as_str();
        if result.as_deref().ok() != expected {
            wrong.push(format!("{conversation}: {source:?}\n  expected {expected:?}\n  got      {result:?}"));
        }
    }
    assert!(wrong.is_empty(), "{} of {} differ:\n{}", wrong.len(), cases.len(), wrong.join("\n"));
}
