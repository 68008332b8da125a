//! Engines that serve different models, where Envoy asks.

use std::io::{Read, Write};
use std::net::TcpListener;

use super::door::{DRAWN, Door, Opened, completion};
use super::streams::{Call, body, destination, post, status};
use crate::harness::until;

/// An engine that lists one model, and its address.
fn lists(card: &'static str) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    std::thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let mut asked = [0; 4_096];
            let read = stream.read(&mut asked).unwrap_or(0);
            let is_list = asked[..read].starts_with(b"GET /v1/models ");
            let text = if is_list { format!("{{\"data\":[{card}]}}") } else { String::new() };
            let head =
                format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\nconnection: close\r\n\r\n", text.len());
            let _ = stream.write_all(format!("{head}{text}").as_bytes()); // who asked may be gone
        }
    });
    address
}

async fn asked(opened: &Opened, model: &str, tokens: u32) -> Call {
    let call = Call::open(opened).await.unwrap();
    call.say(post()).await;
    let text = completion(DRAWN.start..DRAWN.start + tokens, false);
    call.say(body(text.replace("\"m\"", &format!("{model:?}")), true)).await;
    call
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pick_is_among_the_engines_that_serve_the_model_and_others_are_refused() {
    let [first, second] = [
        lists(r#"{"id":"a","owned_by":"vllm","max_model_len":400}"#),
        lists(r#"{"id":"b","owned_by":"vllm","max_model_len":200}"#),
    ];
    let door = Door::start([first.clone(), second.clone()]).await;
    let opened = door.open(|_| {}).await;
    let goes = async |model: &str, tokens: u32| {
        destination(&asked(&opened, model, tokens).await.next().await.unwrap().unwrap())
    };
    let models = || async { (opened.counted("kvfleet_doors_endpoint_models") == 2).then_some(()) };
    until("models of both", models).await;
    // The second has the prompt, and serves another model.
    assert_eq!((goes("a", 160).await, goes("b", 160).await), (first.clone(), second));
    for (model, tokens, expected, code) in
        [("c", 160, 404, "model_not_found"), ("b", 200, 400, "context_length_exceeded")]
    {
        let refusal = asked(&opened, model, tokens).await.refusal().await;
        assert_eq!((status(&refusal), refusal.details.as_str()), (expected, &*format!("kvfleet_{code}")));
        let text = String::from_utf8(refusal.body.to_vec()).unwrap();
        assert!(text.contains(&format!("\"code\":\"{code}\"")), "{text}");
    }
    assert_eq!(goes("a", 399).await, first);
    opened.doors.shutdown().await;
    door.shutdown().await;
}
