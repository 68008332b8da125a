//! Picks among engines that serve different models.

use std::io::{Read, Write};
use std::net::TcpListener;

use super::fixture::{PickerFixture, RESIDENT_PROMPT, RunningPicker, completion};
use super::streams::{PickerStream, body, destination, post, status};
use kvfleet_testkit::cluster::until;

/// Starts an engine that lists one model; returns its address.
fn listing_engine(card: &'static str) -> String {
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
            let _ = stream.write_all(format!("{head}{text}").as_bytes()); // the client may have closed
        }
    });
    address
}

async fn model_request(opened: &RunningPicker, model: &str, tokens: u32) -> PickerStream {
    let call = PickerStream::open(opened).await.unwrap();
    call.send(post()).await;
    let text = completion(RESIDENT_PROMPT.start..RESIDENT_PROMPT.start + tokens, false);
    call.send(body(text.replace("\"m\"", &format!("{model:?}")), true)).await;
    call
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn picks_only_engines_that_serve_the_model() {
    let [first, second] = [
        listing_engine(r#"{"id":"a","owned_by":"vllm","max_model_len":400}"#),
        listing_engine(r#"{"id":"b","owned_by":"vllm","max_model_len":200}"#),
    ];
    let gateway = PickerFixture::start([first.clone(), second.clone()]).await;
    let opened = gateway.open(|_| {}).await;
    let goes = async |model: &str, tokens: u32| {
        destination(&model_request(&opened, model, tokens).await.next().await.unwrap().unwrap())
    };
    let models = || async { (opened.metric("kvfleet_gateway_endpoint_models") == 2).then_some(()) };
    until("the models of both engines", models).await;
    // The second engine has the prompt, but serves another model.
    assert_eq!((goes("a", 160).await, goes("b", 160).await), (first.clone(), second));
    for (model, tokens, expected, code) in
        [("c", 160, 404, "model_not_found"), ("b", 200, 400, "context_length_exceeded")]
    {
        let refusal = model_request(&opened, model, tokens).await.expect_refusal().await;
        assert_eq!((status(&refusal), refusal.details.as_str()), (expected, &*format!("kvfleet_{code}")));
        let text = String::from_utf8(refusal.body.to_vec()).unwrap();
        assert!(text.contains(&format!("\"code\":\"{code}\"")), "{text}");
    }
    assert_eq!(goes("a", 399).await, first);
    opened.gateway.shutdown().await;
    gateway.shutdown().await;
}
