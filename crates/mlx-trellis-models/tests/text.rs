//! Tokenizer, chat template, and text from tokens as they come.

mod support;

use std::fs;
use std::path::Path;

use mlx_trellis_models::{Message, Tokenizer, stop_tokens};
use serde_json::{Value, json};
use support::{scratch, write_tokenizer};

const CHATML: &str = "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}\
    {{ '<|im_start|>system\nBe brief.<|im_end|>\n' }}{% endif %}\
    {{'<|im_start|>' + message['role'] + '\n' + message['content'].strip() + '<|im_end|>' + '\n'}}{% endfor %}\
    {% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

fn settings(folder: &Path, value: Value) {
    fs::write(folder.join("tokenizer_config.json"), value.to_string()).unwrap();
}

#[test]
fn tokens_are_bytes_and_specials_whole() {
    let folder = scratch();
    write_tokenizer(folder.path());
    let tokenizer = Tokenizer::load(folder.path()).unwrap();
    let tokens = tokenizer.encode("Hé <|im_end|>", false).unwrap();
    assert_eq!(tokens, [b'H'.into(), 0xC3, 0xA9, b' '.into(), 257]);
    assert_eq!(tokenizer.decode(&tokens).unwrap(), "Hé ");
    assert!(tokenizer.encode("", true).unwrap().is_empty());
}

#[test]
fn streams_only_whole_characters() {
    let folder = scratch();
    write_tokenizer(folder.path());
    let tokenizer = Tokenizer::load(folder.path()).unwrap();
    let text = "naïve 木 🦀, 👩‍👩‍👧 end";
    let tokens = tokenizer.encode(text, false).unwrap();
    assert_eq!(tokens.len(), text.len());
    let mut stream = tokenizer.stream();
    let mut pieces: Vec<String> = tokens.iter().map(|&t| stream.push(t).unwrap()).collect();
    assert_eq!(pieces[2..4], [String::new(), "ï".to_owned()]);
    pieces.push(stream.finish().unwrap());
    assert!(pieces.iter().all(|p| !p.contains('\u{FFFD}')));
    assert_eq!(pieces.concat(), text);

    // A special token is no text; a character cut short shows at the end, and only there.
    let mut stream = tokenizer.stream();
    let pieces: Vec<String> = [u32::from(b'a'), 257, 0xF0, 0x9F].map(|t| stream.push(t).unwrap()).into();
    assert_eq!(pieces, ["a", "", "", ""]);
    assert_eq!(stream.finish().unwrap(), "\u{FFFD}");
    let mut stream = tokenizer.stream();
    stream.push(0xF0).unwrap();
    assert_eq!(stream.finish().unwrap(), "\u{FFFD}");
    assert_eq!(tokenizer.stream().finish().unwrap(), "");
}

#[test]
fn renders_the_chat_template() {
    let folder = scratch();
    write_tokenizer(folder.path());
    settings(folder.path(), json!({"chat_template": CHATML}));
    let tokenizer = Tokenizer::load(folder.path()).unwrap();
    let chat = tokenizer.chat(&[Message::user(" Hi ")]).unwrap();
    let expected =
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n";
    assert_eq!(chat, expected);
    let chat = tokenizer.chat(&[Message::system("S"), Message::user("U")]).unwrap();
    assert_eq!(chat, expected.replace("Be brief.", "S").replace("Hi", "U"));
    let tokens = tokenizer.encode(&chat, false).unwrap();
    assert_eq!(tokens.iter().filter(|&&t| t >= 256).count(), 5);

    // A list has one called default; a file of its own counts before both.
    settings(
        folder.path(),
        json!({"chat_template": [{"name": "tools", "template": "T"}, {"name": "default", "template": "D"}]}),
    );
    assert_eq!(Tokenizer::load(folder.path()).unwrap().chat(&[]).unwrap(), "D");
    let file = "{{ bos_token }}{{ eos_token }}\n{%- for m in messages if m.content.startswith('a') %}\n  [{{ m.content }}]\n{% endfor %}";
    fs::write(folder.path().join("chat_template.jinja"), file).unwrap();
    settings(
        folder.path(),
        json!({"chat_template": "x", "bos_token": "<s>", "eos_token": {"content": "</s>"}}),
    );
    let chat =
        Tokenizer::load(folder.path()).unwrap().chat(&[Message::user("ab"), Message::user("b")]).unwrap();
    assert_eq!(chat, "<s></s>  [ab]\n");
}

#[test]
fn says_what_is_wrong_with_a_template() {
    let folder = scratch();
    write_tokenizer(folder.path());
    let error = |template: Option<Value>| {
        settings(folder.path(), template.map_or(json!({}), |t| json!({"chat_template": t})));
        Tokenizer::load(folder.path()).and_then(|t| t.chat(&[Message::user("x")])).unwrap_err().to_string()
    };
    assert!(error(None).contains("found none in tokenizer_config.json or chat_template.jinja"));
    let raised = error(Some("\n{{ raise_exception('only system messages') }}".into()));
    assert!(
        raised.contains("tokenizer_config.json: chat template: line 2")
            && raised.contains("only system messages"),
        "{raised}"
    );
    assert!(error(Some("{% if %}".into())).contains("line 1"));
    assert!(error(Some(json!([{"name": "tools", "template": ""}]))).contains("one named default"));
    assert!(error(Some(json!(3))).contains("chat_template: found 3"));
}

#[test]
fn says_what_is_wrong_with_a_tokenizer() {
    let folder = scratch();
    let load = || Tokenizer::load(folder.path()).unwrap_err().to_string();
    assert!(load().contains("tokenizer.json: cannot read"));
    fs::write(folder.path().join("tokenizer.json"), "{\"model\": 3}").unwrap();
    assert!(load().contains("tokenizer.json: "));
    write_tokenizer(folder.path());
    fs::write(folder.path().join("tokenizer_config.json"), "[]").unwrap();
    assert!(load().contains("tokenizer_config.json: found [], expected a JSON object"));
}

#[test]
fn stops_at_every_end_there_is() {
    let folder = scratch();
    let path = folder.path();
    write_tokenizer(path);
    settings(path, json!({"eos_token": "<|im_end|>"}));
    let tokenizer = Tokenizer::load(path).unwrap();
    let stop = || stop_tokens(path, &tokenizer).map_err(|e| e.to_string());
    assert!(stop().unwrap_err().contains("config.json: cannot read"));
    fs::write(path.join("config.json"), r#"{"text_config": {"eos_token_id": 7}}"#).unwrap();
    assert_eq!(stop().unwrap(), [7, 257]);
    fs::write(path.join("config.json"), r#"{"eos_token_id": [4, 5], "text_config": {"eos_token_id": 7}}"#)
        .unwrap();
    assert_eq!(stop().unwrap(), [4, 5, 257]);
    fs::write(path.join("generation_config.json"), r#"{"eos_token_id": [256, 257]}"#).unwrap();
    assert_eq!(stop().unwrap(), [256, 257]);
    fs::write(path.join("generation_config.json"), r#"{"eos_token_id": "2"}"#).unwrap();
    assert!(stop().unwrap_err().contains("generation_config.json: eos_token_id: found \"2\""));
}
