"""Chat templates in the styles of model families, written for these tests; and odd ones."""

CHATML = """\
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

SMOLLM = """\
{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}
{{ '<|im_start|>system\\nYou are a helper<|im_end|>\\n' }}{% endif %}
{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n'}}
{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

QWEN = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- "# Tools\\n\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string and not
           (message.content.startswith('<tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set content = '' %}
    {%- endif %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1] %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index and reasoning %}
            {{- '<|im_start|>assistant\\n<think>\\n' + reasoning.strip('\\n') }}
            {{- '\\n</think>\\n\\n' }}
            {{- content.lstrip('\\n') }}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- endif %}
        {%- if message.tool_calls %}
            {%- for tool_call in message.tool_calls %}
                {%- if (loop.first and content) or (not loop.first) %}{{- '\\n' }}{%- endif %}
                {%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}
                {{- '<tool_call>\\n{"name": "' }}
                {{- tool_call.name }}
                {{- '", "arguments": ' }}
                {%- if tool_call.arguments is string %}
                    {{- tool_call.arguments }}
                {%- else %}
                    {{- tool_call.arguments | tojson }}
                {%- endif %}
                {{- '}\\n</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}{{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""

LLAMA2 = """\
{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}\
{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}\
{% set system_message = false %}{% endif %}{% for message in loop_messages %}\
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('Roles must alternate user/assistant/user/assistant/...') }}{% endif %}\
{% if loop.index0 == 0 and system_message != false %}\
{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}\
{% else %}{% set content = message['content'] %}{% endif %}\
{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}\
{% elif message['role'] == 'assistant' %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}\
{% endfor %}"""

LLAMA3 = """\
{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "26 Jul 2024" %}
    {%- endif %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: " + date_string + "\\n\\n" }}
{%- if tools is not none %}
    {{- "Functions:\\n\\n" }}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'
            + message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
        {{- '{"name": "' + tool_call.name + '", ' }}
        {{- '"parameters": ' }}
        {{- tool_call.arguments | tojson }}
        {{- "}" }}
        {{- "<|eot_id|>" }}
    {%- elif message.role == "tool" or message.role == "ipython" %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

MISTRAL = """\
{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and (message == user_messages[-1]) %}
            {{- "[AVAILABLE_TOOLS] [" }}
            {%- for tool in tools %}
                {%- set tool = tool.function %}
                {{- '{"type": "function", "function": {' }}
                {%- for key, val in tool.items() if key != "return" %}
                    {%- if val is string %}
                        {{- '"' + key + '": "' + val + '"' }}
                    {%- else %}
                        {{- '"' + key + '": ' + val|tojson }}
                    {%- endif %}
                    {%- if not loop.last %}{{- ", " }}{%- endif %}
                {%- endfor %}
                {{- "}}" }}
                {%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" }}{%- endif %}
            {%- endfor %}
            {{- "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- "[TOOL_CALLS] [" }}
        {%- for tool_call in message.tool_calls %}
            {%- set out = tool_call.function|tojson %}
            {{- out[:-1] }}
            {{- ', "id": "' + tool_call.id + '"}' }}
            {%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" + eos_token }}{%- endif %}
        {%- endfor %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"]|trim + eos_token}}
    {%- elif message["role"] == "tool" %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content|string + ", " }}
        {{- '"call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- else %}
        {{- raise_exception("Only user, assistant and tool roles are supported") }}
    {%- endif %}
{%- endfor %}
"""

GEMMA = """\
{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- if messages[0]['content'] is string -%}
        {%- set first_user_prefix = messages[0]['content'] + '\\n\\n' -%}
    {%- else -%}
        {%- set first_user_prefix = messages[0]['content'][0]['text'] + '\\n\\n' -%}
    {%- endif -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set first_user_prefix = "" -%}
    {%- set loop_messages = messages -%}
{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'assistant') -%}
        {%- set role = "model" -%}
    {%- else -%}
        {%- set role = message['role'] -%}
    {%- endif -%}
    {{ '<start_of_turn>' + role + '\\n' + (first_user_prefix if loop.first else "") }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}
            {%- if item['type'] == 'image' -%}
                {{ '<start_of_image>' }}
            {%- elif item['type'] == 'text' -%}
                {{ item['text'] | trim }}
            {%- endif -%}
        {%- endfor -%}
    {%- endif -%}
    {{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{'<start_of_turn>model\\n'}}
{%- endif -%}
"""

PHI = """\
{% for message in messages %}{% if message['role'] == 'system' and 'tools' in message and \
message['tools'] is not none %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|tool|>' \
+ message['tools'] + '<|/tool|>' + '<|end|>' }}{% else %}{{ '<|' + message['role'] + '|>' + \
message['content'] + '<|end|>' }}{% endif %}{% endfor %}{% if add_generation_prompt %}\
{{ '<|assistant|>' }}{% else %}{{ eos_token }}{% endif %}"""

DEEPSEEK = """\
{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}\
{% set ns = namespace(is_first=false, is_tool=false, is_output_first=true, system_prompt='') %}\
{%- for message in messages %}{%- if message['role'] == 'system' %}\
{% set ns.system_prompt = message['content'] %}{%- endif %}{%- endfor %}\
{{bos_token}}{{ns.system_prompt}}\
{%- for message in messages %}{%- if message['role'] == 'user' %}{%- set ns.is_tool = false -%}\
{{'<\uff5cUser\uff5c>' + message['content']}}{%- endif %}\
{%- if message['role'] == 'assistant' and message['tool_calls'] is defined %}\
{%- set ns.is_tool = false -%}{%- for tool in message['tool_calls']%}\
{{'<\uff5ctool\u2581call\uff5c>' + tool['function']['name'] + '\\n```json\\n' + \
tool['function']['arguments']|tojson + '\\n```'}}{%- endfor %}{{'<\uff5cend\uff5c>'}}{%- endif %}\
{%- if message['role'] == 'assistant' and message['tool_calls'] is not defined %}\
{% set content = message['content'] %}{% if '</think>' in content %}\
{% set content = content.split('</think>')[-1] %}{% endif %}\
{{'<\uff5cAssistant\uff5c>' + content + '<\uff5cend\uff5c>'}}{%- endif %}\
{%- if message['role'] == 'tool' %}{%- set ns.is_tool = true -%}\
{%- if ns.is_output_first %}{{'<\uff5coutputs\uff5c>' + message['content']}}\
{%- set ns.is_output_first = false %}{%- else %}{{'\\n' + message['content']}}{%- endif %}\
{%- endif %}{%- endfor -%}\
{% if ns.is_tool %}{{'<\uff5coutputs end\uff5c>'}}{% endif %}\
{% if add_generation_prompt and not ns.is_tool %}{{'<\uff5cAssistant\uff5c>'}}{% endif %}"""

GRANITE = """\
{%- if messages[0]['role'] == 'system' %}
 {%- set system_message = messages[0]['content'] %}
 {%- set loop_messages = messages[1:] %}
{%- else %}
 {%- set system_message = "Knowledge Cutoff Date: April 2024.
Today's Date: " + strftime_now('%B %d, %Y') + "." %}
 {%- if tools and documents %}
  {%- set system_message = system_message + " Tools and documents." %}
 {%- elif tools %}
  {%- set system_message = system_message + " Tools." %}
 {%- endif %}
 {%- set loop_messages = messages %}
{%- endif %}
{{- '<|start_of_role|>system<|end_of_role|>' + system_message + '<|end_of_text|>
' }}
{%- if tools %}
 {{- '<|start_of_role|>tools<|end_of_role|>' }}
 {{- tools | tojson(indent=4) }}
 {{- '<|end_of_text|>
' }}
{%- endif %}
{%- if documents %}
 {%- for document in documents %}
  {{- 'Document ' + loop.index | string + '
' }}
  {{- document['text'] }}
  {%- if not loop.last %}
   {{- '

'}}
  {%- endif%}
 {%- endfor %}
{%- endif %}
{%- for message in loop_messages %}
 {{- '<|start_of_role|>' + message['role'] + '<|end_of_role|>' + (message['content'] or '')
     + '<|end_of_text|>
' }}
 {%- if loop.last and add_generation_prompt %}
  {{- '<|start_of_role|>assistant' }}
  {%- if controls %}
   {{- ' ' + controls | tojson()}}
  {%- endif %}
  {{- '<|end_of_role|>' }}
 {%- endif %}
{%- endfor %}"""

GLM = """\
[gMASK]<sop>
{%- if tools -%}
<|system|>
# Tools
{% for tool in tools %}
{{ tool | tojson(ensure_ascii=False) }}
{% endfor %}
</tools>{%- endif -%}
{%- macro visible_text(content) -%}
    {%- if content is string -%}
        {{- content }}
    {%- elif content is iterable and content is not mapping -%}
        {%- for item in content -%}
            {%- if item is mapping and item.type == 'text' -%}
                {{- item.text }}
            {%- elif item is string -%}
                {{- item }}
            {%- endif -%}
        {%- endfor -%}
    {%- else -%}
        {{- content }}
    {%- endif -%}
{%- endmacro -%}
{%- set ns = namespace(last_user_index=-1) %}
{%- for m in messages %}
    {%- if m.role == 'user' %}{% set ns.last_user_index = loop.index0 -%}{%- endif %}
{%- endfor %}
{% for m in messages %}
{%- if m.role == 'user' -%}<|user|>
{{ visible_text(m.content) }}
{{- '/nothink' if (enable_thinking is defined and not enable_thinking and
    not visible_text(m.content).endswith("/nothink")) else '' -}}
{%- elif m.role == 'assistant' -%}
<|assistant|>
{%- set content = visible_text(m.content) %}
{%- if loop.index0 > ns.last_user_index and m.reasoning_content -%}
{{ '\\n<think>' + m.reasoning_content.strip() + '</think>'}}
{%- else -%}
{{ '\\n<think></think>' }}
{%- endif -%}
{%- if content.strip() -%}
{{ '\\n' + content.strip() }}
{%- endif -%}
{% if m.tool_calls %}
{% for tc in m.tool_calls %}
{{ '\\n<tool_call>' + tc.function.name }}
{% for k, v in tc.function.arguments.items() %}
<arg_key>{{ k }}</arg_key>
<arg_value>{{ v | tojson(ensure_ascii=False) if v is not string else v }}</arg_value>
{% endfor %}
</tool_call>{% endfor %}
{% endif %}
{%- elif m.role == 'system' -%}
<|system|>
{{ visible_text(m.content) }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    <|assistant|>
{%- endif -%}"""

GPT_OSS = """\
{%- macro render_type(spec) -%}
    {%- if spec.type == "array" -%}
        {{- render_type(spec['items']) + "[]" if spec['items'] else "any[]" }}
    {%- elif spec.type == "string" -%}
        {{- '"' + spec.enum|join('" | "') + '"' if spec.enum else "string" }}
    {%- elif spec.type in ("number", "integer") -%}
        {{- "number" }}
    {%- else -%}
        {{- "any" }}
    {%- endif -%}
{%- endmacro -%}
{%- macro render_namespace(tools) -%}
    {%- for tool in tools %}
        {%- set tool = tool.function %}
        {{- "// " + tool.description + "\\n" }}
        {{- "type "+ tool.name + " = (_: {\\n" }}
        {%- for name, spec in tool.parameters.properties.items() %}
            {{- name + ("" if name in (tool.parameters.required or []) else "?") + ": " }}
            {{- render_type(spec) }}
            {{- "," if not loop.last }}
            {{- "\\n" }}
        {%- endfor %}
        {{- "}) => any;\\n\\n" }}
    {%- endfor %}
{%- endmacro -%}
{{- "<|start|>system<|message|>" }}
{{- "Current date: " + strftime_now("%Y-%m-%d") + "\\n\\n" }}
{%- if reasoning_effort is not defined %}{%- set reasoning_effort = "medium" %}{%- endif %}
{{- "Reasoning: " + reasoning_effort + "<|end|>" }}
{%- if messages[0].role == "developer" or messages[0].role == "system" %}
    {%- set developer_message = messages[0].content %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set developer_message = "" %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- if developer_message or tools %}
    {{- "<|start|>developer<|message|>" + developer_message }}
    {%- if tools %}{{- "\\n\\n# Tools\\n\\n" + render_namespace(tools) }}{%- endif %}
    {{- "<|end|>" }}
{%- endif %}
{%- for message in loop_messages -%}
    {%- if message.role == 'assistant' -%}
        {%- if message.thinking and not add_generation_prompt %}
            {{- "<|start|>assistant<|channel|>analysis<|message|>" + message.thinking + "<|end|>" }}
        {%- endif %}
        {%- if "tool_calls" in message %}
            {%- set call = message.tool_calls[0].function %}
            {{- "<|start|>assistant to=functions." + call.name + "<|channel|>commentary json" }}
            {{- "<|message|>" + call.arguments|tojson + "<|call|>" }}
        {%- elif loop.last and not add_generation_prompt %}
            {{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|return|>" }}
        {%- else %}
            {{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|end|>" }}
        {%- endif %}
    {%- elif message.role == 'tool' -%}
        {{- "<|start|>functions to=assistant<|message|>" + message.content|tojson + "<|end|>" }}
    {%- elif message.role == 'user' -%}
        {{- "<|start|>user<|message|>" + message.content + "<|end|>" }}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
<|start|>assistant
{%- endif -%}"""

OLMO = """\
{{ bos_token }}{% for message in messages %}
{% if message['role'] == 'system' %}
{{ '<|system|>\n' + message['content'] + '\n' }}
{% elif message['role'] == 'user' %}
{{ '<|user|>\n' + message['content'] + '\n' }}
{% elif message['role'] == 'assistant' %}
{% generation %}
{% if not loop.last %}
{{ message['content'] + eos_token + '\n' }}
{% else %}
{{ message['content'] + eos_token }}
{% endif %}
{% endgeneration %}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>\n' }}
{% endif %}
{% endfor %}"""

QWEN_CODER = """\
{%- for m in messages %}
    {%- if m.role == "assistant" and m.tool_calls %}
        {{- '<|im_start|>assistant' }}
        {%- if m.content %}{{- '\\n' + m.content | trim + '\\n' }}{%- endif %}
        {%- for call in m.tool_calls %}
            {%- set call = call.function %}
            {{- '\\n<tool_call>\\n<function=' + call.name + '>\\n' }}
            {%- for name, value in call.arguments | items %}
                {{- '<parameter=' + name + '>\\n' }}
                {{- value if value is string else value | tojson | safe }}
                {{- '\\n</parameter>\\n' }}
            {%- endfor %}
            {{- '</function>\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif m.role == "tool" %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
        {{- '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

MISTRAL_NAMES = """\
{{- bos_token }}
{%- for m in messages %}
    {%- if m.role == "user" %}
        {{- '[INST]' + m.content + '[/INST]' }}
    {%- elif m.role == "system" %}
        {{- '[SYSTEM_PROMPT]' + m.content + '[/SYSTEM_PROMPT]' }}
    {%- elif m.role == "assistant" %}
        {%- if m.reasoning_content %}{{- '[THINK]' + m.reasoning_content + '[/THINK]' }}{%- endif %}
        {{- m.content }}
        {%- for call in m.tool_calls %}
            {{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' + call.function.arguments | tojson }}
        {%- endfor %}
        {{- eos_token }}
    {%- elif m.role == "tool" %}
        {{- '[TOOL_RESULTS]' + m.content + '[/TOOL_RESULTS]' }}
    {%- endif %}
{%- endfor %}"""

_DEEPSEEK_CALLS = """\
{{- bos_token }}
{%- for m in messages %}
    {%- if m.role == 'user' %}{{- '<\uff5cUser\uff5c>' + m.content + '<\uff5cAssistant\uff5c>' }}
    {%- elif m.role == 'system' %}{{- m.content }}
    {%- elif m.role == 'tool' %}
        {{- '<\uff5ctool\u2581output\u2581begin\uff5c>' + m.content }}
    {%- else %}
        {%- if m.reasoning_content %}
            {{- '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- m.content + '<\uff5ctool\u2581calls\u2581begin\uff5c>' }}
        {%- for call in m.tool_calls %}
            {%- if not loop.first %}{{- BETWEEN }}{%- endif %}
            {{- CALL }}
            {{- '<\uff5ctool\u2581call\u2581end\uff5c>' }}
        {%- endfor %}
        {{- '<\uff5ctool\u2581calls\u2581end\uff5c>' + eos_token }}
    {%- endif %}
{%- endfor %}"""

_BEGIN = "'<\uff5ctool\u2581call\u2581begin\uff5c>"
_SEPARATOR = "<\uff5ctool\u2581sep\uff5c>'"
_ARGUMENTS = "call.function.arguments | tojson"

DEEPSEEK_V3 = _DEEPSEEK_CALLS.replace("BETWEEN", "'\\n'").replace(
    "CALL", f"{_BEGIN}function{_SEPARATOR} + call.function.name + '\\n```json\\n' + {_ARGUMENTS} "
    "+ '\\n```'")
DEEPSEEK_V31 = _DEEPSEEK_CALLS.replace("BETWEEN", "''").replace(
    "CALL", f"{_BEGIN}' + call.function.name + '{_SEPARATOR} + {_ARGUMENTS}")

FAMILIES = {
    "chatml": CHATML, "smollm": SMOLLM, "qwen": QWEN, "llama2": LLAMA2, "llama3": LLAMA3,
    "mistral": MISTRAL, "gemma": GEMMA, "phi": PHI, "deepseek": DEEPSEEK, "granite": GRANITE,
    "glm": GLM, "gpt_oss": GPT_OSS, "olmo": OLMO,
}

CALLING = {
    "qwen": QWEN, "llama3": LLAMA3, "mistral": MISTRAL, "glm": GLM, "gpt_oss": GPT_OSS,
    "qwen_coder": QWEN_CODER, "mistral_names": MISTRAL_NAMES, "deepseek_v3": DEEPSEEK_V3,
    "deepseek_v31": DEEPSEEK_V31,
}
"""Templates that write calls of tools in a format of their own."""

ODD = [
    "",
    "\n\n  {# a comment #}  \n text \n",
    "  {% if true %}\n  a\n    {% endif %}\n  b\n",
    "  {%+ if true %}\n  a\n    {%+ endif +%}\n  b\n",
    "{%- if true -%}\n  a\n {%- endif %} \n {{- ' c ' -}} \n d",
    "{% raw %}{{ x }}{% endraw %}\r\n{{ 1 }}\r\n",
    "{% for i in range(9) %}{% if i == 2 %}{% continue %}{% elif i > 5 %}{% break %}{% endif %}"
    "{{ i }}{{ loop.cycle('a', 'b') }}{{ loop.last }}{% else %}none{% endfor %}",
    "{% set ns = namespace(a=1, b=[]) %}{% for m in messages %}{% set ns.a = ns.a + 1 %}"
    "{% set ns.b = ns.b + [m.role] %}{% endfor %}{{ ns.a }} {{ ns.b }}",
    "{% macro f(x, y=2) %}<{{ x }}|{{ y }}|{{ varargs }}|{{ kwargs }}|"
    "{{ caller() if caller else '' }}>{% endmacro %}{{ f(1) }}{{ f(1, 3, 4, z=5) }}"
    "{% call f(7) %}in{% endcall %}",
    "{{ messages | tojson }} {{ messages | tojson(indent=2, sort_keys=true) }} "
    "{{ messages | tojson(separators=(',', ':')) }} {{ messages | tojson(ensure_ascii=true) }}",
    "{{ {'f': 1.0, 'i': 10**20, 'n': none, 't': true, 's': '<&\\'\">\u2028\U0001f600'} | tojson }}",
    "{{ odd | tojson }} {{ odd }}",
    "{{ odd.f }} {{ odd.nan }} {{ odd.inf }} {{ odd.tuple }} {{ odd[1] }} {{ odd.big }}",
    "{{ messages[0].content | upper | replace('A', '\u00e9') | center(40) | wordcount }}",
    "{{ messages | map(attribute='role') | join(', ') }} {{ messages | groupby('role') | length }}",
    "{{ messages | selectattr('role', 'eq', 'user') | map(attribute='content') | list }}",
    "{{ messages | last }} {{ messages[-1]['role'] }} {{ messages[0].items() | list }}",
    "{{ absent }}|{{ absent is defined }}|{{ messages[0].absent is none }}|"
    "{{ absent | default(3) }}",
    "{{ dict(a=1, b=2) }} {{ dict.fromkeys(['x', 'y'], 1) }} {{ dict([('k', 'v')]) }}",
    "{{ '%s-%05.1f' | format('a', 2.5) }} {{ '{:>5}'.format('x') }} {{ 'a' ~ 1 ~ none }}",
    "{{ dict.update is defined }}{{ namespace.mro is defined }}{{ dict.__name__ is defined }}",
    "{% filter upper %}a{{ bos_token }}{% endfilter %}{% set block %}x{% endset %}{{ block }}",
    "{% set a, b = 1, 2 %}{{ a }}{{ b }}{{ 7 // 2 }}{{ 2 ** 10 }}{{ 7 % 4 }}{{ 1 if 0 }}"
    "{{ [1, 2][::-1] }}",
    "{% for k, v in {'b': 1, 'a': 2} | dictsort %}{{ k }}{{ v }}{% endfor %}"
    "{% for m in messages recursive %}{{ loop.depth }}{% endfor %}",
    "{{ 'na\u00efve \u6771\u4eac \u0627\u0644 e\u0301 \U0001f469\u200d\U0001f680' | length }}"
    "\u00a0\u3000\ufeff",
    "{{ 'a,b'.split(',') }}{{ ' x '.strip() }}{{ 'abc'[1:] }}{{ 'x' in 'xyz' }}{{ 'ab' * 3 }}",
    "{% if messages[0].content is string and messages is iterable and not odd is string %}y"
    "{% endif %}",
    "{% generation %}a{% set x = 1 %}{% endgeneration %}{{ x }}",
    "{{ 'caf\\u00e9\\n\\t\\x41' }}{{ '\\'' }}{{ \"\\\"\" }}",
    "{{ namespace(a=1).a }}{{ cycler('a', 'b').next() }}{{ joiner(',')() }}{{ lipsum is defined }}",
    "{{ 'a\nb' | indent(2, true) }}{{ ['b', 'A'] | sort }}{{ [3, 1] | max }}{{ 3.7 | int }}"
    "{{ 2.567 | round(1) }}",
    "{%- for m in messages -%}{%- if not loop.first -%}{{ loop.previtem.role }}{%- endif -%}"
    "{{ loop.changed(m.role) }}{%- endfor -%}",
    "{{ messages | string | urlencode | truncate(50) | escape }}{{ '<b>' | striptags | e }}",
    "{{ eos_token }}{{ pad_token }}{{ unk_token }}{{ sep_token }}{{ tools }}{{ documents }}",
]
